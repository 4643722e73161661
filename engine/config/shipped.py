"""The configurations that come with Triaxis, by name."""

import difflib
import os
from pathlib import Path

from triaxis.engine.program import ROOT, short


def shipped_configs() -> dict[str, Path]:
    """Map the shipped configurations' names to their paths: `gpt_tiny` for configs/gpt_tiny.yaml."""
    return {path.stem: path for path in sorted((ROOT / "configs").glob("*.yaml"))}


def config_path(word: str | Path) -> Path:
    """Resolve a word to a path: a file, or a shipped configuration if no file has that name."""
    path = Path(word)
    # Path.is_file raises for a name that no file can have.
    if os.path.isfile(path):  # noqa: PTH113
        return path
    of_name = shipped_configs().get(str(word))
    return path if of_name is None else Path(short(of_name))


def nearest_names(word: str | Path) -> list[str]:
    """Suggest at most three shipped configurations that a wrong name may mean, nearest first."""
    return difflib.get_close_matches(Path(word).stem, shipped_configs(), n=3)
