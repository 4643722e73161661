"""Parts of a corpus that is being made: whole or not there, so that a killed run goes on from them (no torch here).

    PREFIX.parts/DIGEST.tokens    document . eod | document . eod | ..     the corpus's dtype
                 DIGEST.lengths   int32 per document
                 DIGEST.json      written last and atomically: counts, what was left out, the hash of the other two
                 progress         int64 [units, 5]: what each unit has done, for the line that people watch

DIGEST is over all that decides the bytes of a part: its pieces (path, size, time), the tokenizer and the options. So a part is
found again by any later run that needs the same bytes, and by no other.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from triaxis.engine.data.corpus.findings import InputPlace, LeftOut, OnBad, Tally, is_allowed
from triaxis.engine.data.corpus.indexed import Tokens
from triaxis.engine.data.corpus.pieces import Unit
from triaxis.engine.storage.files import HASH_BLOCK_BYTES, write_atomically
from triaxis.engine.storage.json_text import parse_json

SUFFIXES = (".tokens", ".lengths", ".json")
PROGRESS = "progress"
"""Name of the file of a `ProgressTable`."""


@dataclass(frozen=True, slots=True)
class Part:
    """A whole part on disk."""

    path: Path
    """Without a suffix."""
    num_documents: int
    num_tokens: int
    num_bytes: int
    """Bytes of input."""
    num_unknown: int
    """Tokens that stand for what the tokenizer does not know."""
    left_out: Tally

    def token_blocks(self) -> Iterator[bytes]:
        """Yield the tokens' bytes."""
        with self.path.with_suffix(".tokens").open("rb") as handle:
            while block := handle.read(HASH_BLOCK_BYTES):
                yield block

    def lengths(self) -> NDArray[np.int32]:
        """Read the tokens of each document, int32 [num_documents]."""
        return np.fromfile(self.path.with_suffix(".lengths"), "<i4")


def digest_of(unit: Unit, *options: object) -> str:
    """Return the name of a unit's part, hexadecimal.

    Args:
        unit: pieces of files with the options of their reading; contents are not read.
        options: all else that decides its tokens.
    """
    pieces = [
        [str(file.path.absolute()), file.size, file.mtime_ns, astuple(file.options), piece.start, piece.stop]
        for piece in unit
        for file in (piece.file,)
    ]
    return hashlib.sha256(json.dumps([pieces, *options]).encode()).hexdigest()[:32]


def find_part(path: Path, on_bad: OnBad) -> Part | None:
    """Return the whole part of this path; None where there is none, it is damaged, or `on_bad` would not have made it.

    Its bytes are read and hashed: after a power cut, a file may lack what was written to it.
    """
    try:
        content = parse_json(path.with_suffix(".json").read_bytes())
        left_out = {
            kind: LeftOut(found["count"], tuple(InputPlace(**place) for place in found["places"]))
            for kind, found in content["left_out"].items()
        }
        part = Part(
            path,
            content["num_documents"],
            content["num_tokens"],
            content["num_bytes"],
            content["num_unknown"],
            left_out,
        )
        is_whole = _hash(part) == content["sha256"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return part if is_whole and is_allowed(left_out, on_bad) else None


def _hash(part: Part) -> str:
    digest = hashlib.sha256()
    for block in part.token_blocks():
        digest.update(block)
    digest.update(part.lengths().tobytes())
    return digest.hexdigest()


class PartWriter:
    """A writer of one part; a context manager. Only `finish` makes the part whole."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path, self._dtype = path, dtype
        self._sha256 = hashlib.sha256()
        self._lengths: list[bytes] = []
        self.num_documents = self.num_tokens = self.num_unknown = 0
        self._files = ExitStack()

    def __enter__(self) -> Self:
        self._path.with_suffix(".json").unlink(missing_ok=True)
        self._tokens = self._files.enter_context(self._path.with_suffix(".tokens").open("wb"))
        return self

    def add(self, documents: Sequence[Tokens], unknown_id: int | None) -> None:
        """Append documents, their tokens [n] each; `unknown_id` is counted."""
        tokens = np.concatenate(documents)
        data = tokens.astype(self._dtype).tobytes()
        self._tokens.write(data)
        self._sha256.update(data)
        self._lengths.append(np.array([len(each) for each in documents], "<i4").tobytes())
        self.num_documents += len(documents)
        self.num_tokens += len(tokens)
        if unknown_id is not None:
            self.num_unknown += int((tokens == unknown_id).sum())

    def finish(self, num_bytes: int, left_out: Tally) -> Part:
        """Write what marks the part as whole, and return it."""
        self._tokens.close()
        lengths = b"".join(self._lengths)
        self._path.with_suffix(".lengths").write_bytes(lengths)
        self._sha256.update(lengths)
        part = Part(self._path, self.num_documents, self.num_tokens, num_bytes, self.num_unknown, left_out)
        content = {
            "num_documents": part.num_documents,
            "num_tokens": part.num_tokens,
            "num_bytes": num_bytes,
            "num_unknown": part.num_unknown,
            "left_out": {kind: asdict(found) for kind, found in left_out.items()},
            "sha256": self._sha256.hexdigest(),
        }
        # Over several lines: a folder of text that holds these parts does not give them as text.
        write_atomically(self._path.with_suffix(".json"), [json.dumps(content, indent=1).encode()])
        return part

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()


@dataclass(frozen=True, slots=True)
class Done:
    """The work of a preparation so far."""

    num_bytes: int = 0
    """Bytes of input, with those of parts that were whole before."""
    num_documents: int = 0
    num_tokens: int = 0
    found_bytes: int = 0
    """Bytes of input of parts that were whole before: they cost no time."""
    found_tokens: int = 0


class ProgressTable:
    """Counts of every unit in a file that all workers map: each writes its own row, the parent adds them up."""

    COLUMNS = 5

    def __init__(self, path: Path, num_units: int, *, create: bool = False) -> None:
        self._rows: NDArray[np.int64] = np.memmap(
            path, "<i8", "w+" if create else "r+", shape=(num_units, self.COLUMNS)
        )

    def write(self, unit: int, done: Done) -> None:
        self._rows[unit] = (done.num_bytes, done.num_documents, done.num_tokens, done.found_bytes, done.found_tokens)

    def total(self) -> Done:
        return Done(*(int(value) for value in self._rows.sum(axis=0)))
