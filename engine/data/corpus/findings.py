"""Bad input of a corpus: each kind has a name, each case a place, and none is lost in silence.

    --on-bad stop    the first case is an error that names file and line (row of a parquet)
    --on-bad skip    the case is left out; its kind is counted, and the first places of each kind are kept

Documents without text or tokens are counted in both: they are no damage, and there is nothing in them to train on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal

from triaxis.engine.errors import DataError

OnBad = Literal["stop", "skip"]
BLOCK_BYTES = 2**20
PLACES_KEPT = 5
"""Places that are kept of each kind."""


class BadInput(StrEnum):
    """Kinds of input that cannot become tokens."""

    EMPTY_DOCUMENT = "document without text"
    EMPTIED_DOCUMENT = "document of whose text the tokenizer leaves nothing"
    EMPTY_FILE = "empty file"
    VANISHED_FILE = "file that vanished"
    CHANGED_FILE = "file that changed"
    UNREADABLE_FILE = "file that may not be read"
    DAMAGED_FILE = "damaged or truncated file"
    OTHER_FORMAT = "file of a format that is not read"
    NOT_UTF8 = "text that is no UTF-8"
    NOT_UNICODE = "text with half a surrogate pair"
    NOT_JSON = "line that is no JSON"
    NO_FIELD = "document without the field"
    NOT_TEXT = "field that is no text"
    TOO_LONG = "document that is too long"
    NOT_ENCODED = "document that the tokenizer's library fails on"
    OTHER_IDS = "document with ids outside the tokenizer's vocabulary"


@dataclass(frozen=True, slots=True)
class InputPlace:
    """A place in an input, and what is wrong there."""

    path: str
    where: str = ""
    """Line or row; empty for the file as a whole."""
    byte: int | None = None
    """First byte of a line whose number is not known yet, since that means to count the lines before it."""
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.path}, {self.where}: {self.detail}" if self.where else f"{self.path} {self.detail}"

    def with_line(self) -> "InputPlace":
        """Return the place with the number of its line, from 1; this reads the file up to there."""
        if self.byte is None:
            return self
        number, left = 1, self.byte
        with Path(self.path).open("rb") as handle:
            while left and (block := handle.read(min(left, BLOCK_BYTES))):
                number += block.count(b"\n")
                left -= len(block)
        return replace(self, where=f"line {number:,}", byte=None)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The input of one kind that is not in a corpus."""

    count: int
    places: tuple[InputPlace, ...]
    """The first places, at most PLACES_KEPT."""

    def __add__(self, other: "LeftOut") -> "LeftOut":
        return LeftOut(self.count + other.count, (self.places + other.places)[:PLACES_KEPT])


Tally = dict[str, LeftOut]
"""Input that is left out, by the value of its kind."""


def add_up(total: Tally, more: Mapping[str, LeftOut]) -> None:
    """Add the second tally to the first."""
    for kind, found in more.items():
        total[kind] = total.get(kind, LeftOut(0, ())) + found


def is_allowed(tally: Mapping[str, LeftOut], on_bad: OnBad) -> bool:
    """Return true if a corpus with this tally could have been made under `on_bad`."""
    return on_bad == "skip" or not set(tally) - {BadInput.EMPTY_DOCUMENT, BadInput.EMPTIED_DOCUMENT}


class Findings:
    """The bad input that was met so far.

    Args:
        on_bad: `stop` to raise at the first case, `skip` to count.
    """

    def __init__(self, on_bad: OnBad) -> None:
        self._on_bad = on_bad
        self.tally: Tally = {}

    def add(self, kind: BadInput, place: InputPlace, advice: str = "") -> None:
        """Count a case.

        Args:
            kind: of the case.
            place: of the case, with its detail.
            advice: sentences about the rule and the remedy.

        Raises:
            DataError: the findings stop at bad input, and this is some.
        """
        case = {kind.value: LeftOut(1, (place,))}
        if not is_allowed(case, self._on_bad):
            raise DataError(f"{place.with_line()}. {advice} --on-bad skip leaves such input out and counts it.")
        add_up(self.tally, case)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids of the tokenizer that a corpus is made with: 0 .. size - 1, and the one that ends a document."""

    size: int
    eod_id: int


class Reading(Findings):
    """The findings in a piece while it is read, and how far it is read.

    Args:
        on_bad: as for `Findings`.
        vocabulary: that tokens in the input must belong to; None where the tokenizer is not there yet.
    """

    def __init__(self, on_bad: OnBad, vocabulary: Vocabulary | None = None) -> None:
        super().__init__(on_bad)
        self._vocabulary = vocabulary
        self.done_bytes: Callable[[], int] = lambda: 0
        """Returns the bytes of the piece that were read; a reader may leave it as it is."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary; DataError where the tokenizer is to be trained on this very input."""
        if self._vocabulary is None:
            raise no_vocabulary()
        return self._vocabulary


def no_vocabulary() -> DataError:
    """Return the error that the input holds tokens where a tokenizer is to be trained on text."""
    return DataError(
        "--input holds tokens, and train-bpe learns from text: the ids would be of a tokenizer that is not there yet. "
        "Name with --tokenizer the one that made them."
    )
