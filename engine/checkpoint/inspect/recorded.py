"""Files that a checkpoint names, found again wherever the command is typed and wherever the checkpoint was moved (no torch here).

import    ../tokenizer.json        relative to the folder of the checkpoint that records it
run       tok/tokenizer.json       as it was typed: relative to the folder where the run was started, or absolute
"""

from collections.abc import Iterator
from pathlib import Path

from engine.checkpoint.directory import Candidate
from engine.data.corpus.tokenizers import load_tokenizer
from engine.errors import DataError

BYTES = "bytes"
TOKENIZER = "tokenizer"
"""Key of the tokenizer's identity in `TrainingState.data`."""


def recorded_tokenizer(candidate: Candidate) -> str | None:
    """Return what `load_tokenizer` takes for a checkpoint's own tokenizer: `bytes`, a path, or None where none is recorded.

    A path that was typed is tried below the current folder, then below each folder above the checkpoint, for a run lies below the
    folder where it was started. There a file must have the identity that the run recorded. A path that leads nowhere is returned
    as it was recorded, so that the reader of the file names it.
    """
    data = candidate.manifest.config.get("data", {})
    name = data.get("tokenizer")
    if not isinstance(name, str) or name == BYTES:
        return name if name == BYTES else None
    folder = candidate.folder.resolve()
    for path in (folder / name, Path(name)):
        if path.is_file():
            return str(path.resolve())
    identity = candidate.manifest.state.data.get(TOKENIZER)
    for path in _above(folder, name):
        if path.is_file() and identity is not None and _identity(path) == identity:
            return str(path)
    return name


def _above(folder: Path, name: str) -> Iterator[Path]:
    if not Path(name).is_absolute():
        yield from (parent / name for parent in folder.parents)


def _identity(path: Path) -> str | None:
    try:
        return load_tokenizer(str(path)).identity
    except DataError:
        return None
