"""The phase in which a run goes on: rank 0 finds it by the newest checkpoint, before any group of the topology exists.

Layouts of phases may differ, so the phase decides which groups there are. A checkpoint that is saved at the edge of a phase belongs
to the next one.
"""

import os
from pathlib import Path

from triaxis.engine.checkpoint.directory import Candidate, find
from triaxis.engine.comm.runtime import RankEnvironment
from triaxis.engine.comm.store_agreement import rank_0_says
from triaxis.engine.config.phases import at_phase, phase_at
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import TriaxisError
from triaxis.engine.run.directory import RunDirectory, run_name


def config_of_phase(
    config: Config, stem: str, environment: RankEnvironment, *, from_scratch: bool, is_first_start: bool
) -> Config:
    """Return the config with the fields of the phase in which the run goes on; every rank calls it after `start`.

    Args:
        config: as it was read.
        stem: of the config's file, after which a run without a name is named.
        from_scratch, is_first_start: as in `triaxis.launch.rank.directory.open_directory`.
    """
    if not config.phases:
        return config
    name = ""
    if environment.rank == 0:
        name = phase_to_run(config, stem, from_scratch=from_scratch, is_first_start=is_first_start)
    return at_phase(config, rank_0_says(name, "phase"))


def phase_to_run(config: Config, stem: str, *, from_scratch: bool, is_first_start: bool) -> str:
    """Return the name of the phase that follows the checkpoint with which the run would go on.

    What is wrong with that checkpoint is reported where it is loaded; until then the run is taken to begin.
    """
    try:
        directory = RunDirectory.join(config.runtime.runs_dir, run_name(config, stem, os.environ), 0)
        starts_over = directory.starts_over(from_scratch=from_scratch, is_first_start=is_first_start)
        candidate = _candidate(config, directory, starts_over=starts_over)
    except (TriaxisError, OSError):
        candidate = None
    return phase_at(config, 0 if candidate is None else candidate.manifest.state.consumed_tokens).name


def _candidate(config: Config, directory: RunDirectory, *, starts_over: bool) -> Candidate | None:
    own = None if starts_over else next(directory.checkpoints(config).candidates([]), None)
    if own is not None or config.checkpoint.load is None or config.checkpoint.load_what == "weights":
        return own
    return find(Path(config.checkpoint.load))
