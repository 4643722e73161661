"""Files of a corpus, the pieces into which they are cut, and the documents of a piece."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from triaxis.engine.data.corpus.findings import BadInput, Findings, InputPlace
from triaxis.engine.data.corpus.indexed import Tokens


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The choices that a user has about the reading of a file.

    Attributes:
        text_key: field of a JSON line or column of a .parquet with the document; dots enter what is nested.
        format: a name of `readers.FORMATS`; None: by the ending of the file's name.
        separator: of the documents in a text; None: a text is one document.
        max_document_bytes: a longer document is bad input, since a worker holds a document and its ids in memory.
    """

    text_key: str = "text"
    format: str | None = None
    separator: str | None = None
    max_document_bytes: int = 2**28


AS_NAMED = ReadOptions()


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file as it was found. Size and time stand for its content, which may be terabytes."""

    path: Path
    size: int
    mtime_ns: int
    options: ReadOptions = AS_NAMED

    @staticmethod
    def of(path: Path, options: ReadOptions = AS_NAMED) -> "InputFile":
        """Look at a file; OSError where there is none."""
        found = path.stat()
        return InputFile(path, found.st_size, found.st_mtime_ns, options)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file that is read by itself, `start` to `stop` - 1 of what its reader counts (bytes, row groups)."""

    file: InputFile
    start: int
    stop: int
    num_bytes: int
    """Its share of the file's bytes; those of all pieces add up to the file."""


Unit = tuple[Piece, ...]
"""Pieces that one worker encodes into one part of the corpus."""


@dataclass(frozen=True, slots=True)
class Document:
    """A document of an input.

    Attributes:
        place: of it, for findings.
        content: its text, or its token ids, int [n].
    """

    place: InputPlace
    content: str | Tokens


def too_long(file: InputFile, place: InputPlace, findings: Findings) -> None:
    """Add a document above the options' limit to the findings."""
    detail = f"holds a document of more than {file.options.max_document_bytes:,} bytes"
    advice = "A worker has a document and its ids in memory. Divide the text (--separator), or allow it (--max-document-bytes)."
    findings.add(BadInput.TOO_LONG, replace(place, detail=detail), advice)


def field_of(value: Any, key: str) -> Any:
    """Return the field of a JSON object by its name, or by names with dots between them; KeyError where there is none."""
    if isinstance(value, dict) and key in value:
        return value[key]
    for name in key.split("."):
        if not isinstance(value, dict):
            raise KeyError(key)
        value = value[name]
    return value


def share(num_bytes: int, number: int, count: int) -> int:
    """Return the bytes of part `number` where a file is counted as `count` equal parts."""
    return num_bytes * (number + 1) // count - num_bytes * number // count
