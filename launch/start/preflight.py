"""What can be known before eight processes import torch: is the run finished, is the directory its own, can it be written,
is the corpus there? Is there a GPU where something asks for one?

The ranks check the same again (they may stand on other nodes); here it costs a second instead of ten.
"""

import os
from pathlib import Path

from engine.config.telemetry import gpu_tool_problems
from engine.config.tree import Config
from engine.data.corpus.indexed import IndexedTokens
from engine.errors import ConfigError
from engine.run.directory import RunDirectory, run_name


def look_before_training(config: Config, config_path: Path, *, from_scratch: bool = False) -> str | None:
    """What to say instead of starting, if the run is finished; None: start.

    Args:
        config: of the run.
        config_path: its file, after which a run without a name is named.
        from_scratch: whether the run starts at step 0 again, whatever its directory holds.

    Raises:
        StorageError: the run directory or the folder of checkpoints cannot be written.
        TriaxisError: the run directory belongs to another configuration, or holds what no run makes.
        DataError: a corpus is missing or damaged.
    """
    name = run_name(config, config_path.stem, os.environ)
    finished = RunDirectory.look(config, config.runtime.runs_dir, name, from_scratch=from_scratch)
    if finished is not None:
        return finished.finished_message()
    if not config.data.synthetic:
        for _, prefix in [*config.data.train, *(config.data.valid or [])]:
            IndexedTokens(prefix)
    return None


def refuse_without_gpu(config: Config, *, has_gpu: bool, note: str = "") -> None:
    """Refuse what only a GPU can answer where the run is on the CPU.

    Args:
        config: of the run.
        has_gpu: whether its ranks are on GPUs.
        note: why not, if there is more to say.

    Raises:
        ConfigError: all fields that ask for one.
    """
    found = gpu_tool_problems(config.telemetry, f"this run is on the CPU ({note or 'torch finds no GPU here'})")
    if not has_gpu and (problems := list(map(str, found))):
        raise ConfigError(problems)
