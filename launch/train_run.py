"""Trains by a function call, under torchrun or in one process such as a notebook."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triaxis.engine.comm.runtime import RankEnvironment
from triaxis.engine.config.load import load_config
from triaxis.engine.config.tree import Config
from triaxis.engine.config.write import to_yaml
from triaxis.engine.errors import TriaxisError
from triaxis.engine.run.directory import run_name
from triaxis.launch.pretrain_gpt import main
from triaxis.launch.report.record import number, read_run


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A run that has made its last step, or was stopped and saved.

    Attributes:
        directory: run directory.
        exit_code: 0 after the last step; others in `triaxis.engine.errors.ExitCode`.
        losses: float64 [steps made], loss per step in nats per token, from the run's first step on.
    """

    directory: Path
    exit_code: int
    losses: NDArray[np.float64]


def train(
    config: str | Path | Config, overrides: Sequence[str] = (), *, extension: str | Path | None = None
) -> TrainedRun:
    """Train as `triaxis train` does, on torchrun's ranks or in this process alone. Every rank calls it.

    Args:
        config: path, name of a shipped configuration, or result of `load_config`.
        overrides: overrides, `section.key=value`.
        extension: file, package or module name with an `Extension`, in place of `model.extension`.

    Raises:
        TriaxisError: any error that `triaxis train` would print, such as a ConfigError with all problems.
        TriaxisError: the run ended before its first step.
    """
    words = [*overrides, *([f"model.extension={extension}"] if extension is not None else [])]
    environment = RankEnvironment.from_variables(os.environ)
    with tempfile.TemporaryDirectory(prefix="triaxis-") as folder:
        if isinstance(config, Config):
            path = Path(folder) / f"{config.runtime.name or 'train'}.yaml"
            path.write_text(to_yaml(config))
        else:
            path = Path(config)
        asked = load_config(path, words, world_size=environment.world_size, ranks_per_node=environment.local_world_size)
        exit_code = main([str(path), *words])
    directory = Path(asked.runtime.runs_dir) / run_name(asked, path.stem, os.environ)
    if not (directory / "metrics.jsonl").is_file():
        raise TriaxisError(f"the run in {directory} has ended with exit code {exit_code} before its first step")
    steps = read_run(directory).steps
    return TrainedRun(directory, exit_code, np.array([number(step, "loss") for step in steps]))
