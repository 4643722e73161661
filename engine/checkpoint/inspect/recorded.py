"""Files that a checkpoint names, found from any folder and after the checkpoint was moved (no torch here).

import    ../tokenizer.json        relative to the folder of the checkpoint
run       tok/tokenizer.json       as typed: relative to the folder of the run's start, or absolute
"""

from engine.checkpoint.directory import Candidate
from engine.data.corpus.tokenizers import BYTES, load_tokenizer, split_name
from engine.errors import DataError

TOKENIZER = "tokenizer"
"""Key of the tokenizer's identity in `TrainingState.data`."""


def recorded_tokenizer(candidate: Candidate) -> str | None:
    """Return the argument of `load_tokenizer` for a checkpoint's own tokenizer: `bytes`, a path, or None without a record.

    A typed path is tried below the current folder, then below each folder above the checkpoint, since a run is below the folder of
    its start; there the file must have the recorded identity. A path that leads nowhere is returned as recorded, so that the error
    names it.
    """
    data = candidate.manifest.config.get("data", {})
    name = data.get("tokenizer")
    if not isinstance(name, str) or name == BYTES:
        return name if name == BYTES else None
    folder = candidate.folder.resolve()
    relative, pattern = split_name(name)
    after = "" if pattern is None else f":{pattern}"
    for path in (folder / relative, relative):
        if path.exists():
            return f"{path.resolve()}{after}"
    identity = candidate.manifest.state.data.get(TOKENIZER)
    for path in (parent / relative for parent in folder.parents):
        if path.exists() and identity is not None and _identity(f"{path}{after}") == identity:
            return f"{path}{after}"
    return name


def _identity(name: str) -> str | None:
    try:
        return load_tokenizer(name).identity
    except DataError:
        return None
