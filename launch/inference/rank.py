"""Runs a job on one rank, with this rank's part of a trained model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from triaxis.engine.checkpoint.directory import find
from triaxis.launch.inference.request import read_job
from triaxis.launch.rank.join import Rank, join_run
from triaxis.models.inference.load import LoadedModel, load_model


def run(argv: Sequence[str], work: Callable[[Rank, LoadedModel, dict[str, Any]], None]) -> int:
    """Run `work` with the loaded model and return 0.

    Exceptions are raised. The caller prints them and chooses the exit code.

    Args:
        argv: path of the config in the job's folder, then the overrides.
        work: function that every rank calls; only rank 0 prints.
    """
    job = read_job(argv)
    with join_run(argv) as rank:
        candidate = find(Path(job["checkpoint"]))
        work(rank, load_model(candidate, rank.config, rank.topology, job["weights"]), job)
    return 0
