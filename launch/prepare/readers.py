"""Turn files into documents, with one READERS row per file ending.

    .txt (any other name)    one document, or several with separators     a piece is the file, or a byte range
    .jsonl, .json, .ndjson   a document per line                          a piece is a byte range
    .gz, .zst of these       the same, decompressed as a stream           a piece is the file
    .parquet                 a document per row                           a piece is a row group
    .npy, .bin               ready-made tokens                            a piece is the file
    .csv, .tar, .xz, ..      refused by name (`other_formats.py`)

Endings are matched without regard to case. If content contradicts the name, a compressed file is decompressed and any other is
refused. To add a format, write a `Reader` and add its endings to READERS.
"""

import codecs
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from triaxis.engine.data.corpus.findings import BadInput, Findings, InputPlace, Reading
from triaxis.engine.data.corpus.pieces import Document, InputFile, Piece, ReadOptions, field_of, too_long
from triaxis.engine.errors import shown
from triaxis.engine.storage.json_text import parse_json
from triaxis.launch.prepare.other_formats import (
    HEAD_BYTES,
    JSON_OBJECT,
    REFUSED,
    json_form,
    refused_content,
    refused_text,
)
from triaxis.launch.prepare.parquet import Parquet
from triaxis.launch.prepare.streams import DamagedStreamError, Stream, decompress_of, open_stream, split_at
from triaxis.launch.prepare.token_files import TokenFile

DAMAGED = "What follows the damage cannot be read. Copy or download the file again."
NOT_UTF8 = (
    "Guessing would train on wrong characters. Convert it first (Latin-1: iconv -f latin1 -t utf-8), or leave it out."
)
BINARY = "It has zero bytes, so it is UTF-16 (iconv -f utf-16 -t utf-8) or no text at all. Convert it first, or leave it out."
BOM = "\ufeff"
"""The byte order mark that Windows programs write at the start of a file; it is not part of the text."""


class Reader(Protocol):
    """The interface for one file format, which cuts files into pieces and reads their documents."""

    @property
    def title(self) -> str:
        """The format's name, as printed to users."""
        ...

    def pieces(self, file: InputFile, step: int, findings: Findings) -> Iterator[Piece]:
        """Yield a file's pieces in order; none if the file is bad. They depend on the file and `step` alone.

        Args:
            file: non-empty input file.
            step: bytes per piece, for files that can be cut anywhere.
            findings: collector to which a bad file is added.
        """
        ...

    def documents(self, piece: Piece, reading: Reading) -> Iterator[Document]:
        """Yield a piece's non-empty documents, and add bad ones to `reading`.

        A reader may set `reading.done_bytes` for the progress.

        Raises:
            OSError: the file cannot be opened or read.
        """
        ...


class Text:
    """The reader for files that hold one document, or several with a separator between them."""

    title = "text"

    def pieces(self, file: InputFile, step: int, findings: Findings) -> Iterator[Piece]:
        separator = file.options.separator
        yield from _cut(file, step if separator and not _has_border(separator) else file.size)

    def documents(self, piece: Piece, reading: Reading) -> Iterator[Document]:
        file, separator = piece.file, piece.file.options.separator
        path, is_plain = str(file.path), decompress_of(file.path) is None
        try:
            with open_stream(file.path) as stream:
                if separator is not None:
                    reading.done_bytes = lambda: min(stream.raw.tell() - piece.start, piece.num_bytes)
                records = _whole(stream, piece) if separator is None else split_at(separator.encode(), stream, piece)
                for number, (at, content) in enumerate(records, start=1):
                    if at == 0:
                        head = _head(file.path) if content is None else content
                        if (other := refused_content(head) or refused_text(head, file)) is not None:
                            other.refuse(file, reading)
                            return
                    place = InputPlace(path)
                    if separator is not None:
                        place = InputPlace(path, byte=at) if is_plain else InputPlace(path, f"document {number:,}")
                    yield from self._document(content, place, file, reading)
        except DamagedStreamError as error:
            reading.add(BadInput.DAMAGED_FILE, InputPlace(path, detail=f"is damaged or truncated ({error})"), DAMAGED)

    def _document(
        self, content: bytes | None, place: InputPlace, file: InputFile, reading: Reading
    ) -> Iterator[Document]:
        if content is None:
            too_long(file, place, reading)
            return
        try:
            text = content.decode().removeprefix(BOM)
        except UnicodeDecodeError as error:
            detail = f"is no UTF-8 text: byte {error.start:,} is 0x{content[error.start]:02x}"
            reading.add(BadInput.NOT_UTF8, replace(place, detail=detail), BINARY if b"\0" in content else NOT_UTF8)
            return
        if text.count("\0") * 4 > len(text):  # UTF-16 without a BOM has zeros, valid UTF-8
            detail = f"is no UTF-8 text: {text.count(chr(0)):,} of its {len(text):,} characters are zero"
            reading.add(BadInput.NOT_UTF8, replace(place, detail=detail), BINARY)
            return
        if file.options.separator is not None:
            # A line break beside a separator belongs to the separator, as in files where it stands on a line of its own.
            text = text.strip("\r\n")
        if text:
            yield Document(place, text)
        elif file.options.separator is None:
            reading.add(BadInput.EMPTY_DOCUMENT, replace(place, detail="has no text"))


class JsonLines:
    """The reader for files with one JSON object per line. Blank lines are skipped."""

    title = "JSON lines"

    def pieces(self, file: InputFile, step: int, findings: Findings) -> Iterator[Piece]:
        head = _head(file.path)
        other = None if head is None else refused_content(head) or json_form(head)
        if other is None:
            yield from _cut(file, step)
        else:
            other.refuse(file, findings)

    def documents(self, piece: Piece, reading: Reading) -> Iterator[Document]:
        file, path, number = piece.file, str(piece.file.path), 0
        with open_stream(file.path) as stream:
            reading.done_bytes = lambda: min(stream.raw.tell() - piece.start, piece.num_bytes)
            try:
                for number, (at, line) in enumerate(split_at(b"\n", stream, piece), start=1):
                    place = InputPlace(path, byte=at) if piece.start else InputPlace(path, f"line {number:,}")
                    if line is None:
                        too_long(file, place, reading)
                        continue
                    line = line.removeprefix(codecs.BOM_UTF8) if at == 0 else line
                    if line.strip():
                        yield from _document(line, file.options.text_key, place, reading)
            except DamagedStreamError as error:
                detail = f"the file is damaged or truncated here ({error})"
                reading.add(BadInput.DAMAGED_FILE, InputPlace(path, f"line {number + 1:,}", detail=detail), DAMAGED)


def _cut(file: InputFile, step: int) -> Iterator[Piece]:
    if decompress_of(file.path) is not None:
        step = file.size  # a compressed stream can only be read from its beginning
    for start in range(0, file.size, step):
        stop = min(start + step, file.size)
        yield Piece(file, start, stop, stop - start)


def _has_border(separator: str) -> bool:
    """Whether the separator can overlap itself. The places where it is found then depend on where reading begins."""
    return any(separator.startswith(separator[start:]) for start in range(1, len(separator)))


def _whole(stream: Stream, piece: Piece) -> Iterator[tuple[int, bytes | None]]:
    """Yield a whole file as one record (first byte 0, content). The content is None above the size limit."""
    limit = piece.file.options.max_document_bytes
    content = stream.content.read(limit + 1)
    yield 0, None if len(content) > limit else content


def _head(path: Path) -> bytes | None:
    """Read a file's first HEAD_BYTES, decompressed; None if these bytes are damaged."""
    try:
        with open_stream(path) as stream:
            return stream.content.read(HEAD_BYTES)
    except DamagedStreamError:
        return None


def _document(line: bytes, text_key: str, place: InputPlace, reading: Reading) -> Iterator[Document]:
    """Yield the document in a line, or add the line to the findings."""
    content: str | list[int] = ""
    try:
        kind, detail, content = _parse(line, text_key)
    except ValueError as error:
        kind = BadInput.NOT_UTF8 if isinstance(error, UnicodeDecodeError) else BadInput.NOT_JSON
        detail = str(error)
    if kind is None:
        yield Document(place, content if isinstance(content, str) else np.array(content))
    else:
        example = f'{{"{text_key}": "some text"}}'
        advice = f"Each line of a .jsonl is one document, for example {example}; --text-key names another field."
        reading.add(kind, replace(place, detail=detail), advice)


def _parse(line: bytes, text_key: str) -> tuple[BadInput | None, str, Any]:
    """Parse a JSON line into (None, "", text or ids).

    If the field `text_key` is missing, empty, or no valid text or ids, return (fault, detail, "") instead.

    Raises:
        ValueError: the line as a whole is not JSON, or not UTF-8.
    """
    # If an object had the key twice, one text would be lost silently.
    value = parse_json(line.decode(), is_unique=line.count(f'"{text_key}"'.encode()) > 1)
    try:
        content = field_of(value, text_key)
    except KeyError:
        names = ", ".join(map(repr, value)) if isinstance(value, dict) else _named(value)
        return BadInput.NO_FIELD, f"it has no field {text_key!r}, but {names or 'no field'}", ""
    if isinstance(content, list) and content:
        wrong = next((at for at, token in enumerate(content) if type(token) is not int or not 0 <= token < 2**31), None)
        if wrong is None:
            return None, "", content
        detail = f"item {wrong + 1:,} of the list {text_key!r} is {shown(content[wrong])}, and ids are integers from 0 to 2^31 - 1"
        return BadInput.NOT_TEXT, detail, ""
    if content in ("", []):
        return BadInput.EMPTY_DOCUMENT, f"the field {text_key!r} is empty", ""
    if not isinstance(content, str):
        return BadInput.NOT_TEXT, f"the field {text_key!r} is {_named(content)}, not text", ""
    if not _is_unicode(content):
        return BadInput.NOT_UNICODE, f"the field {text_key!r} has half a surrogate pair, which is no character", ""
    return None, "", content


def _named(value: Any) -> str:
    """Name a JSON value's type for a message."""
    return "null" if value is None else f"a {type(value).__name__}"


def _is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogate, which JSON can express and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


FORMATS: dict[str, Reader] = {"text": Text(), "jsonl": JsonLines(), "parquet": Parquet(), "tokens": TokenFile()}
"""Format by the name that --format accepts."""
READERS: dict[str, Reader] = {
    **{
        f"{ending}{packed}": FORMATS["text"]
        for ending in (".txt", "")
        for packed in ("", ".gz", ".zst")
        if ending + packed
    },
    **{f"{end}{packed}": FORMATS["jsonl"] for end in (".jsonl", ".json", ".ndjson") for packed in ("", ".gz", ".zst")},
    ".parquet": FORMATS["parquet"],
    ".npy": FORMATS["tokens"],
    ".bin": FORMATS["tokens"],
}
"""Format by lower-case ending; the longest matching ending decides."""


def reader_of(path: Path, options: ReadOptions) -> Reader:
    """Choose a file's reader by the format in the options, else by the name's ending, else text."""
    if options.format is not None:
        return FORMATS[options.format]
    ending = ending_of(path)
    return READERS.get(ending) or REFUSED.get(ending) or FORMATS["text"]


def ending_of(path: Path) -> str:
    """Find a file name's longest ending in READERS or REFUSED, in lower case; "" if there is none."""
    name = path.name.lower()
    return max((ending for ending in (*READERS, *REFUSED) if name.endswith(ending)), key=len, default="")


def is_input_of_folder(path: Path) -> bool:
    """Whether a file found in a folder is an input.

    Its ending must be known and not that of a token file. A .json must not be one object over several lines.
    """
    ending = ending_of(path)
    if ending == ".json":
        head = _head(path)
        return head is None or json_form(head) is not JSON_OBJECT
    return ending in READERS and READERS[ending] is not FORMATS["tokens"]
