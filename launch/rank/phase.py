"""Find the phase, and the setting `sequence_counts`, with which a run continues.

A phase is a stretch of the run with its own settings. Rank 0 reads the newest checkpoint before any group exists, because layouts
may differ between phases. A checkpoint saved at a phase's end belongs to the next phase. A run keeps its earlier `sequence_counts`,
which says which experts the MoE sequence loss counts.
"""

import os
from pathlib import Path

from triaxis.engine.checkpoint.directory import Candidate, find
from triaxis.engine.checkpoint.resume_rules import SEQUENCE_COUNTS, accepting, with_kept_counts
from triaxis.engine.comm.runtime import RankEnvironment
from triaxis.engine.comm.store_agreement import rank_0_says
from triaxis.engine.config.quantities.run_phases import at_phase, phase_at
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import TriaxisError
from triaxis.engine.run.directory import RunDirectory, run_name


def config_of_phase(
    config: Config, stem: str, environment: RankEnvironment, *, from_scratch: bool, is_first_start: bool
) -> Config:
    """Return the config for the phase in which the run continues.

    Every rank calls it once the ranks can reach each other.

    Args:
        config: configuration as read.
        stem: stem of the config's file name, which names an unnamed run.
        from_scratch, is_first_start: see `triaxis.launch.rank.directory.open_directory`.
    """
    moe = config.model.moe
    may_keep = moe is not None and moe.balance.sequence_loss > 0
    if not (config.phases or may_keep):
        return config
    name, counts = "", ""
    if environment.rank == 0:
        candidate = to_go_on_with(config, stem, from_scratch=from_scratch, is_first_start=is_first_start)
        if config.phases:
            name = phase_after(config, candidate)
        kept = config_after(at_phase(config, name) if config.phases else config, candidate)
        counts = "" if kept.model.moe is None else kept.model.moe.balance.sequence_counts
    if config.phases:
        config = at_phase(config, rank_0_says(name, "phase"))
    return with_value(config, SEQUENCE_COUNTS, rank_0_says(counts, "sequence counts")) if may_keep else config


def phase_after(config: Config, candidate: Candidate | None) -> str:
    """Return the name of the phase that follows a checkpoint, or of the first phase without a checkpoint."""
    return phase_at(config, 0 if candidate is None else candidate.manifest.state.consumed_tokens).name


def config_after(config: Config, candidate: Candidate | None) -> Config:
    """Return the configuration in which a run continues from a checkpoint.

    With `sequence_counts: choices`, the sequence loss counts the chosen experts. If the checkpoint's run had this setting, the
    setting is kept and a note is printed. To prevent both, name the setting in `checkpoint.accept`.
    """
    if candidate is None:
        return config
    kept = with_kept_counts(candidate.manifest.config, config)
    if kept != config:
        print(
            f"note: {SEQUENCE_COUNTS} stays choices: the sequence loss of {candidate.folder} counts the experts that tokens chose. "
            f"With scores it would be another loss; if that is meant: {accepting([*config.checkpoint.accept, SEQUENCE_COUNTS])}"
        )
    return kept


def to_go_on_with(config: Config, stem: str, *, from_scratch: bool, is_first_start: bool) -> Candidate | None:
    """Find the checkpoint from which the run would continue; None if it begins at step 0.

    A checkpoint with problems is ignored here and reported when it is loaded.
    """
    try:
        directory = RunDirectory.join(config.runtime.runs_dir, run_name(config, stem, os.environ), 0)
        starts_over = directory.starts_over(from_scratch=from_scratch, is_first_start=is_first_start)
        return _candidate(config, directory, starts_over=starts_over)
    except (TriaxisError, OSError):
        return None


def _candidate(config: Config, directory: RunDirectory, *, starts_over: bool) -> Candidate | None:
    own = None if starts_over else next(directory.checkpoints(config).candidates([]), None)
    if own is not None or config.checkpoint.load is None or config.checkpoint.load_what == "weights":
        return own
    return find(Path(config.checkpoint.load))
