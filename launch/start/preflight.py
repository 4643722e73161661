"""Check a run's directory, corpora and GPUs before its ranks start.

The ranks check again, because they may be on other nodes. Here a check takes one second, since no rank has to import torch.
"""

import os
from pathlib import Path

from triaxis.engine.config.rules.telemetry import gpu_tool_problems
from triaxis.engine.config.tree import Config
from triaxis.engine.data.corpus.own import open_corpus
from triaxis.engine.data.corpus.tokenizers import BYTES
from triaxis.engine.data.run_tokenizer import corpora_of, with_tokenizer
from triaxis.engine.errors import ConfigError
from triaxis.engine.run.directory import RunDirectory, run_name


def look_before_training(config: Config, config_path: Path, *, from_scratch: bool = False) -> str | None:
    """Check a run's directory and corpora.

    Args:
        config_path: the config's file, which names an unnamed run.
        from_scratch: whether the run starts at step 0 again, regardless of its directory's content.

    Returns:
        The message to print if the run is already finished; None if it can start.

    Raises:
        StorageError: the run directory or the checkpoint folder cannot be written.
        TriaxisError: the run directory belongs to another configuration, or contains something no run writes.
        DataError: a corpus is missing or damaged, or was encoded by another tokenizer.
    """
    name = run_name(config, config_path.stem, os.environ)
    finished = RunDirectory.look(config, config.runtime.runs_dir, name, from_scratch=from_scratch)
    if finished is not None:
        return finished.finished_message(config)
    for prefix in corpora_of(config):
        open_corpus(prefix, config.model.own, config.data.tokenizer or BYTES)
    with_tokenizer(config)
    return None


def refuse_without_gpu(config: Config, *, has_gpu: bool, note: str = "") -> None:
    """Refuse configuration fields that need a GPU if the run is on the CPU.

    Args:
        has_gpu: whether the run's ranks are on GPUs.
        note: reason why they are not, if known.

    Raises:
        ConfigError: all fields that need a GPU.
    """
    found = gpu_tool_problems(config.telemetry, f"this run is on the CPU ({note or 'torch finds no GPU here'})")
    if not has_gpu and (problems := list(map(str, found))):
        raise ConfigError(problems)
