"""What can be known before eight processes import torch: is the run finished, is the directory its own, is the corpus there?

The ranks check the same again (they may stand on other nodes); here it costs a second instead of ten.
"""

import os
from pathlib import Path

from engine.config import Config
from engine.data.indexed import IndexedTokens
from engine.telemetry.run_dir import RunDirectory, run_name


def look_before_training(config: Config, config_path: Path) -> str | None:
    """What to say instead of starting, if the run is finished; None: start.

    Raises:
        TriaxisError: the run directory belongs to another configuration.
        DataError: a corpus is missing or damaged.
    """
    name = run_name(config, config_path.stem, os.environ)
    finished = RunDirectory.look(config, config.runtime.runs_dir, name)
    if finished is not None:
        return finished.finished_message()
    if not config.data.synthetic:
        for _, prefix in [*config.data.train, *(config.data.valid or [])]:
            IndexedTokens(prefix)
    return None
