"""Describes input files, their pieces, and the documents in a piece."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from triaxis.engine.data.corpus.findings import BadInput, Findings, InputPlace
from triaxis.engine.data.corpus.indexed import Tokens


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The user's options for reading a file.

    Attributes:
        text_key: JSON field or parquet column that holds the document; dots enter nested fields.
        format: name in `FORMATS` (`launch/prepare/readers`); None: the file name's ending decides.
        separator: text between two documents in a file; None: the file is one document.
        max_document_bytes: size limit; a longer document is bad input.
    """

    text_key: str = "text"
    format: str | None = None
    separator: str | None = None
    max_document_bytes: int = 2**28


AS_NAMED = ReadOptions()


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input file. Its size and mtime show whether the file has changed."""

    path: Path
    size: int
    mtime_ns: int
    options: ReadOptions = AS_NAMED

    @staticmethod
    def of(path: Path, options: ReadOptions = AS_NAMED) -> "InputFile":
        """Read a file's size and mtime. OSError if the file does not exist."""
        found = path.stat()
        return InputFile(path, found.st_size, found.st_mtime_ns, options)


@dataclass(frozen=True, slots=True)
class Piece:
    """Part `start` to `stop` - 1 of a file, in the reader's unit (bytes, row groups)."""

    file: InputFile
    start: int
    stop: int
    num_bytes: int
    """This piece's share of the file's bytes; all shares add up to the file size."""


Unit = tuple[Piece, ...]
"""Pieces that one worker encodes into one part of the corpus."""


@dataclass(frozen=True, slots=True)
class Document:
    """An input document.

    Attributes:
        place: location in the input, for findings.
        content: text, or token ids, int [n].
    """

    place: InputPlace
    content: str | Tokens


def too_long(file: InputFile, place: InputPlace, findings: Findings) -> None:
    """Add a document that exceeds the options' size limit to the findings. DataError if `--on-bad` is `stop`."""
    detail = f"holds a document of more than {file.options.max_document_bytes:,} bytes"
    advice = "A worker has a document and its ids in memory. Divide the text (--separator), or allow it (--max-document-bytes)."
    findings.add(BadInput.TOO_LONG, replace(place, detail=detail), advice)


def field_of(value: Any, key: str) -> Any:
    """Look up a JSON object's field by its name or by a dotted path. KeyError if the field is missing."""
    if isinstance(value, dict) and key in value:
        return value[key]
    for name in key.split("."):
        if not isinstance(value, dict):
            raise KeyError(key)
        value = value[name]
    return value


def share(num_bytes: int, number: int, count: int) -> int:
    """Compute the length of part `number` (from 0), if `num_bytes` bytes are split into `count` nearly equal parts."""
    return num_bytes * (number + 1) // count - num_bytes * number // count
