"""The ranks of a run agree on its directory: which attempt this is, and whether the run is finished already."""

import os

from engine.errors import TriaxisError
from engine.telemetry.run_dir import RunDirectory, run_name
from launch.rank import Rank


def open_directory(rank: Rank, stem: str, *, from_scratch: bool) -> RunDirectory | None:
    """The run directory: rank 0 decides, the others follow; None on the others if it could not. Every rank calls it.

    Args:
        rank: this one.
        stem: of the config's file, after which a run without a name is named.
        from_scratch: whether a run that has saved checkpoints may start at step 0 again.

    Raises:
        TriaxisError: why rank 0 could not, on rank 0.
    """
    config, world = rank.config, rank.topology.axis("world")
    name = run_name(config, stem, os.environ)
    directory, error = None, None
    attempt_or_refused, finished = 0.0, 0.0
    if rank.number == 0:
        try:
            directory = RunDirectory.create(config, config.runtime.runs_dir, name, from_scratch=from_scratch)
            attempt_or_refused, finished = float(directory.attempt), float(directory.finished is not None)
        except TriaxisError as refused:
            error, attempt_or_refused = refused, -1.0
    attempt_or_refused, finished = world.agree([attempt_or_refused, finished], rank.topology.device, "run directory")
    if error is not None:
        raise error
    if attempt_or_refused < 0:
        return None
    if directory is None:
        directory = RunDirectory.join(config.runtime.runs_dir, name, int(attempt_or_refused))
        directory.finished = {} if finished else None
    return directory
