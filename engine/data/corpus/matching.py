"""The check that a corpus was encoded with a model's tokenizer (no torch here).

    PREFIX.json has the tokenizer's identity       it is that of one of the model's, or the corpus is refused
    PREFIX.json of an earlier version, or none     vocabulary and ids are compared, and the result says that this is no proof

Ids of another tokenizer would be learned as noise: nothing else in a run would notice.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from engine.data.corpus.indexed import IndexedTokens
from engine.data.corpus.record import CorpusRecord, read_record
from engine.data.corpus.tokenizers import Tokenizer, load_tokenizer
from engine.errors import DataError
from engine.program import triaxis

MOST_IDS = 2**22
"""Token ids of a corpus that are looked at."""


@dataclass(frozen=True, slots=True)
class Match:
    """The tokenizer of a corpus among those of a model.

    Attributes:
        name: for `load_tokenizer`.
        tokenizer: opened.
        corpus: opened.
        evidence: what was compared, as a few words.
        is_proven: the corpus records this very tokenizer.
    """

    name: str
    tokenizer: Tokenizer
    corpus: IndexedTokens
    evidence: str
    is_proven: bool


def match_tokenizer(prefix: str, names: Sequence[str], vocab_size: int, model: str) -> Match:
    """Find the tokenizer of a corpus among those of a model.

    Args:
        prefix: of the corpus.
        names: of the model's tokenizers, for `load_tokenizer`, the preferred one first; none: the corpus' recorded one is taken.
        vocab_size: of the model, without padding.
        model: its name, for messages.

    Raises:
        DataError: the corpus is missing or damaged; it was encoded otherwise, or with ids that the model lacks; no tokenizer is
            known, or none of them can be opened.
    """
    corpus, record = IndexedTokens(prefix), read_record(prefix)
    largest = corpus.largest_id(MOST_IDS)
    if largest >= vocab_size or (record is not None and record.vocab_size > vocab_size):
        ids = f"id {largest:,}" if record is None else f"a vocabulary of {record.vocab_size:,} ids"
        raise DataError(
            f"{prefix} has {ids}, and {model} {vocab_size:,} tokens: there is no embedding for the others. {_again(names, prefix)}"
        )
    if not names:
        return _recorded(prefix, corpus, record, vocab_size, model)
    opened = _open(names)
    if record is not None and record.tokenizer_identity:
        for name, tokenizer in opened:
            if tokenizer.identity_with(record.eod_id) == record.tokenizer_identity:
                return Match(name, tokenizer, corpus, "the corpus records this tokenizer", True)
        raise _other(prefix, record, opened[0][1], model, names)
    name, tokenizer = opened[0]
    if record is not None and record.vocab_size != tokenizer.vocab_size:
        raise _other(prefix, record, tokenizer, model, names)
    if largest >= tokenizer.vocab_size:
        raise DataError(
            f"{prefix} has id {largest:,}, and the tokenizer of {model} ends at {tokenizer.vocab_size - 1:,}: the corpus was "
            f"encoded with another one, and its ids would mean other words. {_again(names, prefix)}"
        )
    return Match(name, tokenizer, corpus, f"the corpus records none; its ids are below {largest + 1:,}", False)


def _open(names: Sequence[str]) -> list[tuple[str, Tokenizer]]:
    """Open the tokenizers that can be opened; the error of the first where none can."""
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


def _recorded(prefix: str, corpus: IndexedTokens, record: CorpusRecord | None, vocab_size: int, model: str) -> Match:
    """Return the tokenizer that a corpus records, for a model that came without one."""
    if record is None:
        raise DataError(
            f"neither {model} nor {prefix} has a tokenizer: a run could not be recognised by it, and would write no text. Put the "
            "model's tokenizer.json into its folder."
        )
    try:
        tokenizer = load_tokenizer(record.tokenizer)
    except DataError as error:
        raise DataError(
            f"{model} has no tokenizer, and that of {prefix} cannot be opened: {error} Put the model's tokenizer.json into its "
            "folder."
        ) from None
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"{record.tokenizer} of {prefix} has ids up to {tokenizer.vocab_size - 1:,}, and {model} {vocab_size:,} tokens: some "
            "words would have no embedding. Prepare the text again with the model's own tokenizer."
        )
    return Match(record.tokenizer, tokenizer, corpus, "that of the corpus: the model came without one", False)


def _other(prefix: str, record: CorpusRecord, tokenizer: Tokenizer, model: str, names: Sequence[str]) -> DataError:
    return DataError(
        f"{prefix} was prepared with the tokenizer {record.tokenizer} ({record.vocab_size:,} ids), and that of {model} "
        f"({tokenizer.vocab_size:,} ids) is another one: the same ids would mean other words. {_again(names, prefix)}"
    )


def _again(names: Sequence[str], prefix: str) -> str:
    tokenizer = names[0] if names else "TOKENIZER"
    line = triaxis(f"prepare --tokenizer {shlex.quote(tokenizer)} --input TEXT --output {shlex.quote(prefix)}-2")
    return f"Prepare the text again:  {line}"
