"""Finds a corpus's tokenizer, or compares a model's tokenizers with the corpus.

The corpus's record, PREFIX.json, decides what is compared:

    record with an identity       a tokenizer in the model's folder must have the recorded identity
    record without an identity    vocabulary sizes and ids are compared; another tokenizer could match too
    no record                     ids are compared; another tokenizer could match too

A tokenizer's identity is a hash. The recorded name may be a relative path, and the corpus may have moved. So a file counts as the
recorded tokenizer only if its identity matches.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from triaxis.engine.data.corpus.indexed import IndexedTokens
from triaxis.engine.data.corpus.record import CorpusRecord, read_record
from triaxis.engine.data.corpus.tokenizer import Tokenizer
from triaxis.engine.data.corpus.tokenizers import BYTES, SENTENCEPIECE, TOKENIZER_JSON, load_tokenizer, split_name
from triaxis.engine.errors import DataError
from triaxis.engine.program import triaxis

MOST_IDS = 2**22
"""Number of token ids examined per corpus, about."""


@dataclass(frozen=True, slots=True)
class Match:
    """A model's tokenizer that matches a corpus.

    Attributes:
        name: tokenizer name for `load_tokenizer`.
        tokenizer: opened tokenizer.
        corpus: opened corpus.
        evidence: phrase that states what was compared.
        is_proven: whether the corpus's record has an identity (hash), and the model's own tokenizer has the same one.
    """

    name: str
    tokenizer: Tokenizer
    corpus: IndexedTokens
    evidence: str
    is_proven: bool


def match_tokenizer(prefix: str, names: Sequence[str], vocab_size: int, model: str) -> Match:
    """Find which of a model's tokenizers encoded a corpus.

    If the corpus records no tokenizer identity (hash), the first tokenizer with the recorded vocabulary size, if any, is taken. The
    corpus's ids must then lie in that vocabulary. Names that cannot be opened are passed over.

    Args:
        prefix: corpus path without an ending.
        names: names of the model's tokenizers for `load_tokenizer`, preferred one first; empty: the corpus's recorded tokenizer.
        vocab_size: model vocabulary without padding.
        model: model name, for error messages.

    Raises:
        DataError: the corpus is missing or damaged, was encoded by another tokenizer, or has ids that the model lacks; or no
            tokenizer is known or can be opened.
    """
    corpus, record = IndexedTokens(prefix), read_record(prefix)
    _, largest = corpus.ids(MOST_IDS)
    if largest >= vocab_size or (record is not None and record.num_embeddings > vocab_size):
        ids = f"id {largest:,}" if record is None else f"a vocabulary of {record.num_embeddings:,} ids"
        raise DataError(
            f"{prefix} has {ids}, but {model} has {vocab_size:,} tokens: larger ids would have no embedding. "
            f"{_again(names, prefix)}"
        )
    if not names:
        return _recorded(prefix, corpus, record, model)
    opened = _open(names)
    name, tokenizer = opened[0]
    if record is not None:
        found = next((one for one in opened if is_recorded(one[1], record)), None)
        if found is None:
            raise _other(prefix, record, tokenizer, f"that of {model}", names)
        if record.tokenizer_identity:
            return Match(*found, corpus, "the corpus records this tokenizer", True)
        name, tokenizer = found
    if largest >= tokenizer.vocab_size:
        raise DataError(
            f"{prefix} has id {largest:,}, and the tokenizer of {model} ends at {tokenizer.vocab_size - 1:,}: the corpus was "
            f"encoded with another one, and its ids would mean other words. {_again(names, prefix)}"
        )
    return Match(name, tokenizer, corpus, f"the corpus records no identity; its ids are below {largest + 1:,}", False)


def recorded_as(prefix: str, record: CorpusRecord, name: str) -> str:
    """Return `name`, its folder or a file inside, whichever opens the recorded tokenizer exactly.

    A tokenizer.json and its folder give the same ids, but may end documents differently. `right_spelling` lists what is tried.

    Raises:
        DataError: the tokenizer cannot be opened, or is not the recorded one.
    """
    found = right_spelling(name, lambda tokenizer: is_recorded(tokenizer, record))
    if found is None:
        raise _other(prefix, record, load_tokenizer(name), f"data.tokenizer = {name}", [name])
    return found


def find_recorded(prefix: str, record: CorpusRecord) -> str:
    """Locate the tokenizer that a corpus records, and return its name for `load_tokenizer`.

    The recorded path is tried relative to the current folder, then beside the corpus, also as PREFIX.tokenizer.json, then relative
    to each folder above the corpus.

    Raises:
        DataError: no file at these places is the recorded tokenizer.
    """
    if record.tokenizer == BYTES:
        return BYTES
    path, pattern = split_name(record.tokenizer)
    after = "" if pattern is None else f":{pattern}"
    above = [] if path.is_absolute() else [parent / path for parent in Path(prefix).resolve().parents]
    places = (path, Path(prefix).with_name(path.name), Path(f"{prefix}.{TOKENIZER_JSON}"), *above)
    problem = ""
    for place in places:
        if place.exists():
            try:
                if is_recorded(load_tokenizer(f"{place}{after}"), record):
                    return f"{place}{after}"
                problem = problem or f"{place} has changed since the corpus was prepared."
            except DataError as error:
                problem = str(error)
    raise DataError(
        f"{prefix} was prepared with the tokenizer {record.tokenizer}, which is neither there nor beside the corpus. "
        f"{problem or 'No text of a run could be read without it.'} Say where it is: data.tokenizer=PATH"
    )


def right_spelling(name: str, is_right: Callable[[Tokenizer], bool]) -> str | None:
    """Find the first spelling of a tokenizer's name that `is_right` accepts, or None.

    The first spelling is `name`. If `name` is a tokenizer.json or tokenizer.model, the file's folder follows. Otherwise these two
    files in the folder `name` follow.

    Raises:
        DataError: no spelling names a tokenizer that can be opened.
    """
    path, _ = split_name(name)
    if path.name in (TOKENIZER_JSON, SENTENCEPIECE):
        others = [str(path.parent)]
    else:
        others = [str(path / file) for file in (TOKENIZER_JSON, SENTENCEPIECE) if (path / file).is_file()]
    return next((each for each, tokenizer in _open([name, *others]) if is_right(tokenizer)), None)


def is_recorded(tokenizer: Tokenizer, record: CorpusRecord) -> bool:
    """Whether a corpus records this tokenizer, regardless of which token ends documents.

    If an older record has no identity, only the vocabulary sizes are compared.
    """
    if not record.tokenizer_identity:
        return tokenizer.vocab_size == record.vocab_size
    return tokenizer.identity_with(record.eod_id) == record.tokenizer_identity


def _open(names: Sequence[str]) -> list[tuple[str, Tokenizer]]:
    """Open every tokenizer that can be opened. If none can, the first error is raised."""
    opened: list[tuple[str, Tokenizer]] = []
    problems: list[DataError] = []
    for name in names:
        try:
            opened.append((name, load_tokenizer(name)))
        except DataError as error:
            problems.append(error)
    if not opened:
        raise problems[0]
    return opened


def _recorded(prefix: str, corpus: IndexedTokens, record: CorpusRecord | None, model: str) -> Match:
    """Match a model without its own tokenizer to the tokenizer that the corpus records."""
    if record is None:
        raise DataError(
            f"neither {model} nor {prefix} has a tokenizer, so a run could neither compare tokenizers nor write text. Put the "
            "model's tokenizer.json into its folder."
        )
    try:
        name = find_recorded(prefix, record)
    except DataError as error:
        raise DataError(
            f"{model} has no tokenizer, and that of {prefix} cannot be opened: {error} Put the model's tokenizer.json into its "
            "folder."
        ) from None
    return Match(name, load_tokenizer(name), corpus, "that of the corpus: the model came without one", False)


def _other(prefix: str, record: CorpusRecord, tokenizer: Tokenizer, whose: str, names: Sequence[str]) -> DataError:
    return DataError(
        f"{prefix} was prepared with the tokenizer {record.tokenizer} ({record.vocab_size:,} ids), and {whose} "
        f"({tokenizer.vocab_size:,} ids) is another one: the same ids would mean other words. {_again(names, prefix)}"
    )


def _again(names: Sequence[str], prefix: str) -> str:
    tokenizer = names[0] if names else "TOKENIZER"
    line = triaxis(f"prepare --tokenizer {shlex.quote(tokenizer)} --input TEXT --output {shlex.quote(prefix)}-2")
    return f"Prepare the text again:  {line}"
