"""Write and find the parts of an unfinished corpus.

A part has one unit's documents (a unit: input pieces encoded together). It is complete or absent, so a killed run can continue:

    PREFIX.parts/DIGEST.tokens    document . eod | document . eod | ..     the corpus's dtype
                 DIGEST.lengths   int32 per document
                 DIGEST.json      written last and atomically; has counts, findings, and a hash over the other two files
                 progress         int64 [units, 4], the counts in `Done` for each unit

DIGEST is a hash over the input pieces (path, size, mtime), the tokenizer and the options. So a later run finds an earlier run's
part if, and only if, it needs the same bytes.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass, fields
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
"""The `ProgressTable` file's name."""


@dataclass(frozen=True, slots=True)
class Part:
    """The encoded documents of one unit (input pieces encoded together), complete on disk.

    `left_out` counts the unit's bad input, which was not encoded.
    """

    path: Path
    """Path of the part's files, without their suffix."""
    num_documents: int
    num_tokens: int
    num_bytes: int
    """Number of input bytes that the part encodes."""
    num_unknown: int
    """Number of tokens with the tokenizer's unknown id."""
    left_out: Tally

    def token_blocks(self) -> Iterator[bytes]:
        """Yield the token file's bytes in blocks of HASH_BLOCK_BYTES."""
        with self.path.with_suffix(".tokens").open("rb") as handle:
            while block := handle.read(HASH_BLOCK_BYTES):
                yield block

    def lengths(self) -> NDArray[np.int32]:
        """Read each document's length in tokens, int32 [num_documents]."""
        return np.fromfile(self.path.with_suffix(".lengths"), "<i4")


def digest_of(unit: Unit, *options: object) -> str:
    """Compute the name of a unit's part, 32 hexadecimal digits, without reading file contents.

    Args:
        unit: input pieces.
        options: all other values on which the part's tokens depend.
    """
    pieces = [
        [str(file.path.absolute()), file.size, file.mtime_ns, astuple(file.options), piece.start, piece.stop]
        for piece in unit
        for file in (piece.file,)
    ]
    return hashlib.sha256(json.dumps([pieces, *options]).encode()).hexdigest()[:32]


def find_part(path: Path, on_bad: OnBad) -> Part | None:
    """Load the complete part at this path; None if it is absent or damaged.

    The result is also None if the part leaves out bad input and `on_bad` is stop. The whole part is read and hashed.
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
    """A context manager that writes the files of one part. The part is complete only after `finish`."""

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
        """Append documents, each as tokens [n], and count the tokens with `unknown_id`."""
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
        """Write the documents' lengths, then the .json that marks the part as complete. Return the part.

        `num_bytes` is the number of input bytes that were encoded.
        """
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
        # Several lines: `inputs.py` passes over such a .json, so a text folder that holds these parts does not read them as text.
        write_atomically(self._path.with_suffix(".json"), [json.dumps(content, indent=1).encode()])
        return part

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()


@dataclass(frozen=True, slots=True)
class Done:
    """Counts of the work finished so far, in one unit or in a whole preparation.

    `found_bytes` is the share of the input that an earlier run had finished.
    """

    num_bytes: int = 0
    """Input bytes, including those in parts from an earlier run."""
    num_documents: int = 0
    num_tokens: int = 0
    found_bytes: int = 0
    """Input bytes in parts that an earlier run had completed, which cost no time."""


class ProgressTable:
    """A memory-mapped file of progress, with one row of `Done` counts per unit of input pieces.

    Workers write their units' rows, and the parent process sums all rows.
    """

    def __init__(self, path: Path, num_units: int, *, create: bool = False) -> None:
        shape = num_units, len(fields(Done))
        self._rows: NDArray[np.int64] = np.memmap(path, "<i8", "w+" if create else "r+", shape=shape)

    def write(self, unit: int, done: Done) -> None:
        self._rows[unit] = astuple(done)

    def total(self) -> Done:
        return Done(*(int(value) for value in self._rows.sum(axis=0)))
