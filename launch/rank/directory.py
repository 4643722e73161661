"""Open one run directory on all ranks, and record in it that an attempt begins."""

import os

from triaxis.engine.comm.texts import announce, gather_text
from triaxis.engine.errors import ExitCode, StorageError, TriaxisError
from triaxis.engine.run.directory import RunDirectory, run_name
from triaxis.engine.storage.state_files import explaining_storage
from triaxis.launch.rank.join import Rank
from triaxis.launch.start.process.failure import ExplainedError, code_of


def open_directory(rank: Rank, stem: str, *, from_scratch: bool, is_first_start: bool) -> RunDirectory:
    """Open the run directory as rank 0 decides. Every rank calls it.

    Args:
        stem: stem of the config's file name, which names an unnamed run.
        from_scratch: whether a run with saved checkpoints should start at step 0 again.
        is_first_start: whether the command is started for the first time. After a restart, `from_scratch` is ignored if an attempt
            has begun since it was asked for.

    Raises:
        TriaxisError: on rank 0, it could not open the directory; on every rank, some cannot write their logs.
        ExplainedError: on the other ranks, rank 0 could not open the directory.
    """
    config, world = rank.config, rank.topology.axis("world")
    name = run_name(config, stem, os.environ)
    directory: RunDirectory | None = None
    error: Exception | None = None
    attempt, finished, code = 0.0, 0.0, 0.0
    if rank.number == 0:
        try:
            joined = RunDirectory.join(config.runtime.runs_dir, name, 0)
            starts_over = joined.starts_over(from_scratch=from_scratch, is_first_start=is_first_start)
            directory = RunDirectory.create(config, config.runtime.runs_dir, name, from_scratch=starts_over)
            attempt, finished = float(directory.attempt), float(directory.finished is not None)
        except Exception as refused:  # even for a bug of ours: the others must not wait for it
            error, code = refused, float(code_of(refused))
    attempt, finished, code = world.sum_values([attempt, finished, code], rank.topology.device, "run directory")
    if error is not None:
        raise error
    if code:
        raise ExplainedError(int(code))
    if directory is None:
        directory = RunDirectory.join(config.runtime.runs_dir, name, int(attempt))
        directory.finished = {} if finished else None
    if not finished:
        _try_logs(rank, directory)
    return directory


def begin_attempt(rank: Rank, directory: RunDirectory) -> None:
    """Record this attempt in the directory, on rank 0. Every rank calls it once its starting state is loaded.

    Raises:
        StorageError: rank 0 cannot write there; raised on every rank.
    """
    problem, is_passing = "", False
    if rank.number == 0:
        try:
            directory.begin(rank.config)
        except StorageError as error:
            problem, is_passing = str(error), error.exit_code == ExitCode.BROKE
    world = rank.topology.axis("world")
    text = announce(world, f"{'passing' if is_passing else 'lasting'} {problem}", rank.topology.device, "run directory")
    kind, _, problem = text.partition(" ")
    if problem:
        raise StorageError(problem, is_passing=kind == "passing")


_ACCESS = "Give access to it, or name another folder by runtime.runs_dir."


def _try_logs(rank: Rank, directory: RunDirectory) -> None:
    """Create the log folder on every node, and check that each rank can write its own log.

    Raises:
        TriaxisError: raised on every rank, naming those that cannot.
    """
    path, problem = directory.rank_log(rank.number), ""
    try:
        with explaining_storage(path.parent, "the log of a rank", _ACCESS):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    except StorageError as error:
        problem = str(error)
    told = gather_text(rank.topology.axis("world"), problem, rank.topology.device, "run directory")
    problems = [f"rank {number}: {text}" for number, text in enumerate(told) if text]
    if problems:
        raise TriaxisError("\n".join(problems[:3]))
