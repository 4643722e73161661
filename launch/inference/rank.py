"""One rank of a command that reads a trained model: joins, loads its part of the checkpoint, does its part of the job."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.checkpoint.directory import find
from engine.comm.runtime import RankEnvironment
from engine.errors import TriaxisError
from launch.inference.request import read_job
from launch.rank.join import Rank, join, read_config
from launch.start.process.failure import INTERRUPTED
from launch.start.process.parent_death import end_with_parent
from models.inference.load import LoadedModel, load_model


def run(argv: Sequence[str], work: Callable[[Rank, LoadedModel, dict[str, Any]], None]) -> int:
    """Run `work` with the loaded model; the exit code tells a user's mistake (2) from a failure (1).

    Args:
        argv: the config's path, with the job beside it, and the overrides (`launch/inference/request.py`).
        work: every rank calls it; rank 0 is the one that prints.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    environment = RankEnvironment.from_variables(os.environ)
    try:
        config = read_config(argv, environment)
        job = read_job(argv)
        with join(config, environment) as rank:
            work(rank, load_model(find(Path(job["checkpoint"])), config, rank.topology), job)
    except TriaxisError as error:
        if environment.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
