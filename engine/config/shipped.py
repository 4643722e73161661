"""The configurations that come with Triaxis, by name."""

import difflib
import os
from pathlib import Path

from triaxis.engine.program import ROOT, short


def shipped_configs() -> dict[str, Path]:
    """Return the paths of the shipped configurations by their names: `gpt_tiny` for configs/gpt_tiny.yaml."""
    return {path.stem: path for path in sorted((ROOT / "configs").glob("*.yaml"))}


def config_path(word: str | Path) -> Path:
    """Return the path that a word means: a file, or a shipped configuration where no file has that name."""
    path = Path(word)
    # Path.is_file raises for a name that no file can have.
    if os.path.isfile(path):  # noqa: PTH113
        return path
    of_name = shipped_configs().get(str(word))
    return path if of_name is None else Path(short(of_name))


def nearest_names(word: str | Path) -> list[str]:
    """Return at most three names of shipped configurations that a wrong one may mean, the nearest first."""
    return difflib.get_close_matches(Path(word).stem, shipped_configs(), n=3)
