"""Files that a checkpoint names, found from any folder and after the checkpoint was moved (no torch here).

import    ../tokenizer.json        relative to the folder of the checkpoint
run       tok/tokenizer.json       as typed: relative to the folder of the run's start, or absolute
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from triaxis.engine.checkpoint.directory import Candidate
from triaxis.engine.data.corpus.matching import find_recorded, is_recorded, right_spelling
from triaxis.engine.data.corpus.record import CorpusRecord, read_record
from triaxis.engine.data.corpus.tokenizers import BYTES, BytesTokenizer, Tokenizer, load_tokenizer, split_name
from triaxis.engine.errors import DataError

TOKENIZER = "tokenizer"
"""Key of the tokenizer's identity in `TrainingState.data`."""

END_OF_DOCUMENTS = "end of documents"
"""Key of the id that ends their documents there, as text: `prepare --eod-token` may have chosen it."""


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


def trained_tokenizer(candidate: Candidate, name: str, option: str) -> str:
    """Return the name under which a tokenizer is that of a checkpoint's model: its own, its folder's or its file's.

    The identity in the checkpoint decides, but that of bytes proves nothing: earlier versions assumed bytes where a configuration
    named no tokenizer. Then the records of its corpora do, as far as they are found above the checkpoint or from here.

    Args:
        candidate: the checkpoint.
        name: for `load_tokenizer`.
        option: that names another tokenizer in the reader's command: `--tokenizer`.

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
    """Return the id that ended documents in the training of a checkpoint; the tokenizer's own where none is recorded."""
    return int(candidate.manifest.state.data.get(END_OF_DOCUMENTS, tokenizer.eod_id))


def _records(candidate: Candidate) -> Iterator[tuple[str, CorpusRecord]]:
    """Yield the corpora of a checkpoint's run that are found and have a record."""
    data = candidate.manifest.config.get("data", {})
    for source in [] if data.get("synthetic") else data.get("train") or []:
        prefix = source["path"]
        for place in (*(parent / prefix for parent in candidate.folder.resolve().parents), Path(prefix)):
            # A file of that name may be something else, which proves nothing.
            with suppress(DataError):
                if (record := read_record(str(place))) is not None:
                    yield str(place), record
                    break


def _identity(name: str) -> str | None:
    try:
        return load_tokenizer(name).identity
    except DataError:
        return None
