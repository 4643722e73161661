"""Records bad input by kind and place, so that none is dropped silently.

    --on-bad stop    raises an error at the first case, with file and line (row in a parquet file)
    --on-bad skip    leaves cases out, counts them by kind, and keeps the first places for each kind

Documents without text or tokens are counted in both modes. They contain nothing to train on, so they are not damage.
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
"""Places kept per kind."""


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
    """A place in an input file, and what is wrong there."""

    path: str
    where: str = ""
    """Line or row; empty for the whole file."""
    byte: int | None = None
    """Byte offset of the line while its number is unknown; `with_line` finds the number by counting the lines before it."""
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.path}, {self.where}: {self.detail}" if self.where else f"{self.path} {self.detail}"

    def with_line(self) -> "InputPlace":
        """Return the place with its line number, from 1.

        If only a byte offset is known, the file's lines up to the offset are counted.
        """
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
    """The left-out cases of one `BadInput` kind: their count, and first places in the input."""

    count: int
    places: tuple[InputPlace, ...]
    """First places, at most PLACES_KEPT."""

    def __add__(self, other: "LeftOut") -> "LeftOut":
        return LeftOut(self.count + other.count, (self.places + other.places)[:PLACES_KEPT])


Tally = dict[str, LeftOut]
"""Left-out input, keyed by the value of its `BadInput` kind."""


def add_up(total: Tally, more: Mapping[str, LeftOut]) -> None:
    """Add the cases in `more` to `total`, in place."""
    for kind, found in more.items():
        total[kind] = total.get(kind, LeftOut(0, ())) + found


def is_allowed(tally: Mapping[str, LeftOut], on_bad: OnBad) -> bool:
    """Whether `on_bad` allows the left-out input in this tally. `stop` allows only documents without text or tokens."""
    return on_bad == "skip" or not set(tally) - {BadInput.EMPTY_DOCUMENT, BadInput.EMPTIED_DOCUMENT}


class Findings:
    """The bad input found so far.

    Args:
        on_bad: `stop` to raise at the first case, `skip` to count cases.
    """

    def __init__(self, on_bad: OnBad) -> None:
        self._on_bad = on_bad
        self.tally: Tally = {}

    def add(self, kind: BadInput, place: InputPlace, advice: str = "") -> None:
        """Count a case of bad input, or raise an error for it.

        Args:
            kind: kind of bad input.
            place: location of the case, with its detail.
            advice: sentences about the rule and the remedy.

        Raises:
            DataError: `on_bad` is `stop`, which does not allow this kind.
        """
        case = {kind.value: LeftOut(1, (place,))}
        if not is_allowed(case, self._on_bad):
            raise DataError(f"{place.with_line()}. {advice} --on-bad skip leaves such input out and counts it.")
        add_up(self.tally, case)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The id range 0 .. size - 1 of a corpus's tokenizer, and its end-of-document id."""

    size: int
    eod_id: int


class Reading(Findings):
    """The findings in a piece of input that is being read, and the reader's progress.

    Args:
        on_bad: `stop` or `skip`, as in `Findings`.
        vocabulary: ids allowed in inputs that hold tokens; None if the tokenizer is not trained yet.
    """

    def __init__(self, on_bad: OnBad, vocabulary: Vocabulary | None = None) -> None:
        super().__init__(on_bad)
        self._vocabulary = vocabulary
        self.done_bytes: Callable[[], int] = lambda: 0
        """Function that returns the number of bytes read from the piece; setting it is optional for a reader."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Ids allowed in token inputs. DataError if the tokenizer is not trained yet."""
        if self._vocabulary is None:
            raise no_vocabulary()
        return self._vocabulary


def no_vocabulary() -> DataError:
    """Build the error for `train-bpe` input that holds token ids instead of text."""
    return DataError(
        "--input holds tokens, but train-bpe learns from text: the ids would belong to a tokenizer that does not exist yet. "
        "Name the one that made them with --tokenizer."
    )
