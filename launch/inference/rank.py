"""One rank of a command that reads a trained model: it joins, loads its part of the checkpoint, and runs its part of the job."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from triaxis.engine.checkpoint.directory import find
from triaxis.launch.inference.request import read_job
from triaxis.launch.rank.join import Rank, join_run
from triaxis.models.inference.load import LoadedModel, load_model


def run(argv: Sequence[str], work: Callable[[Rank, LoadedModel, dict[str, Any]], None]) -> int:
    """Run `work` with the loaded model; the exit code separates a user's mistake (2) from a failure (1).

    Args:
        argv: the path of the config, in the folder of the job, and the overrides (`launch/inference/request.py`).
        work: every rank calls it; rank 0 is the one that prints.
    """
    job = read_job(argv)
    with join_run(argv) as rank:
        candidate = find(Path(job["checkpoint"]))
        work(rank, load_model(candidate, rank.config, rank.topology, job["weights"]), job)
    return 0
