"""Finds the tokenizer, corpora and extension that a checkpoint names, even if files have moved.

A checkpoint records paths in one of two forms:

    an import records    ../tokenizer.json      relative to the checkpoint's folder
    a run records        tok/tokenizer.json     absolute, or relative to the folder where the run was started
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from triaxis.engine.checkpoint.directory import Candidate
from triaxis.engine.config.schema.extension import placed
from triaxis.engine.data.corpus.matching import find_recorded, is_recorded, right_spelling
from triaxis.engine.data.corpus.record import CorpusRecord, read_record
from triaxis.engine.data.corpus.tokenizer import Tokenizer
from triaxis.engine.data.corpus.tokenizers import BYTES, BytesTokenizer, load_tokenizer, split_name
from triaxis.engine.errors import DataError

TOKENIZER = "tokenizer"
"""Key of the tokenizer's identity in `TrainingState.data`."""

END_OF_DOCUMENTS = "end of documents"
"""Key of the end-of-document id in `TrainingState.data`, as text: `prepare --eod-token` may have chosen it."""


def recorded_config(candidate: Candidate) -> dict[str, Any]:
    """Return a checkpoint's configuration, with a usable path to its extension.

    If the extension's sources are gone or changed, the configuration names the copy that the run keeps, if any.
    """
    config = dict(candidate.manifest.config)
    if (extension := (config.get("model") or {}).get("extension")) is not None:
        # runs/<name>/checkpoints/step_<number>
        config["model"] = config["model"] | {"extension": placed(extension, candidate.folder.absolute().parents[1])}
    return config


def recorded_tokenizer(candidate: Candidate) -> str | None:
    """Find a checkpoint's own tokenizer, as a name for `load_tokenizer`. None: its configuration names none.

    The recorded path is tried relative to the checkpoint, then to the current folder, then to each folder above the checkpoint. In
    this last search the file must have the recorded identity. A path that is not found is returned as recorded.
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


def trained_tokenizer(candidate: Candidate, name: str, option: str) -> str:
    """Return `name`, its folder or a file inside, whichever opens the checkpoint's own tokenizer.

    The tokenizer must have the identity (hash) that the checkpoint records. An identity of `bytes` proves nothing, because earlier
    versions assumed `bytes`. With that identity or none, the tokenizer must match the records of the run's corpora, if found.

    Args:
        candidate: the model's checkpoint.
        name: name for `load_tokenizer`; `right_spelling` lists what is tried.
        option: option with which the user can name another tokenizer, for the message, such as `--tokenizer `.

    Raises:
        DataError: the tokenizer cannot be opened, or is another one.
    """
    identity = candidate.manifest.state.data.get(TOKENIZER)
    is_assumed = identity in (None, BytesTokenizer().identity)
    records = dict(_records(candidate)) if is_assumed else {}

    def is_right(tokenizer: Tokenizer) -> bool:
        return (is_assumed or tokenizer.identity == identity) and all(
            is_recorded(tokenizer, record) for record in records.values()
        )

    found = right_spelling(name, is_right)
    if found is not None:
        return found
    right, source = candidate.manifest.config["data"].get("tokenizer"), str(candidate.folder)
    if records:
        prefix, record = next(each for each in records.items() if not is_recorded(load_tokenizer(name), each[1]))
        try:
            right = find_recorded(prefix, record)
        except DataError:
            right = record.tokenizer
        source = f"{prefix}, a corpus of {candidate.folder}"
    raise DataError(
        f"the tokenizer {name} is not that of {source}, which is {right}: the same ids would mean other words. "
        f"Give that one: {option}{right}"
    )


def end_of_documents(candidate: Candidate, tokenizer: Tokenizer) -> int:
    """Return the end-of-document id in a checkpoint's training data, else the tokenizer's own."""
    return int(candidate.manifest.state.data.get(END_OF_DOCUMENTS, tokenizer.eod_id))


def _records(candidate: Candidate) -> Iterator[tuple[str, CorpusRecord]]:
    """Yield (prefix, record) for each training corpus that is found and has a record."""
    data = candidate.manifest.config.get("data", {})
    for source in [] if data.get("synthetic") else data.get("train") or []:
        prefix = source["path"]
        for place in (*(parent / prefix for parent in candidate.folder.resolve().parents), Path(prefix)):
            # Another file may have that name, so an error proves nothing.
            with suppress(DataError):
                if (record := read_record(str(place))) is not None:
                    yield str(place), record
                    break


def _identity(name: str) -> str | None:
    try:
        return load_tokenizer(name).identity
    except DataError:
        return None
