"""Files to documents: one record of READERS per ending of a name (no torch here).

    .txt (any other name)   one document                          a piece is the file
    .jsonl                  a document per line                   a piece is a range of bytes
    .json, .ndjson          the same, if the file holds lines     a piece is a range of bytes
    .gz, .zst of these      the same, decompressed as a stream    a piece is the file
    .parquet                a document per row                    a piece is a row group
    .csv, .tar, .xz, ..     refused by name: `other_formats.py`

Capitals in an ending count as small letters. A new format is a class with `pieces` and `documents`, and its row here.
"""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Protocol

from triaxis.engine.data.corpus.findings import Findings, Kind, Place, Reading
from triaxis.engine.data.corpus.other_formats import REFUSED, lines_command
from triaxis.engine.data.corpus.parquet import Parquet
from triaxis.engine.data.corpus.pieces import InputFile, Piece
from triaxis.engine.data.corpus.streams import DamagedStreamError, Opener, Stream, open_gzip, open_plain, open_zstandard
from triaxis.engine.storage.json_text import parse_json

DAMAGED = "What follows the damage cannot be read. Copy or download the file again."
NOT_UTF8 = (
    "Guessing would train on wrong characters. Convert it first (Latin-1: iconv -f latin1 -t utf-8), or leave it out."
)
BINARY = "It has zero bytes, so it is UTF-16 (iconv -f utf-16 -t utf-8) or no text at all. Convert it first, or leave it out."
BOM = "\ufeff"
"""The mark that Windows writes at the head of a file. It is no character of the text."""
HEAD_BYTES = 2**16
"""Bytes of a .json that show its form; a longer first line is taken for one of many."""


class Reader(Protocol):
    """A format of files with text."""

    def pieces(self, file: InputFile, text_key: str, step: int, findings: Findings) -> Iterator[Piece]:
        """Yield the pieces of a file in order: a function of the file and of `step`, and nothing of a file that is bad as a whole.

        Args:
            file: not empty.
            text_key: field that holds a document, where the format has fields.
            step: bytes of a piece, where a file can be cut anywhere.
            findings: takes the bad file.
        """
        ...

    def documents(self, piece: Piece, text_key: str, reading: Reading) -> Iterator[str]:
        """Yield the documents of a piece that have text; `reading` takes the others, and may be given how far the piece is read.

        Raises:
            OSError: the file cannot be opened or read.
        """
        ...


@dataclass(frozen=True, slots=True)
class WholeText:
    """A file that is one document."""

    open: Opener

    def pieces(self, file: InputFile, text_key: str, step: int, findings: Findings) -> Iterator[Piece]:
        yield Piece(file, 0, file.size, file.size)

    def documents(self, piece: Piece, text_key: str, reading: Reading) -> Iterator[str]:
        path = piece.file.path
        try:
            with self.open(path) as stream:
                content = stream.content.read()
            text = content.decode().removeprefix(BOM)
        except DamagedStreamError as error:
            place = Place(str(path), detail=f"is damaged or truncated ({error})")
            reading.add(Kind.DAMAGED_FILE, place, DAMAGED)
        except UnicodeDecodeError as error:
            detail = f"is no UTF-8 text: byte {error.start:,} is 0x{content[error.start]:02x}"
            reading.add(Kind.NOT_UTF8, Place(str(path), detail=detail), BINARY if b"\0" in content else NOT_UTF8)
        else:
            if text:
                yield text
            else:
                reading.add(Kind.EMPTY_DOCUMENT, Place(str(path), detail="has no text"))


@dataclass(frozen=True, slots=True)
class JsonLines:
    """A file with a JSON object per line; blank lines are none."""

    open: Opener

    def pieces(self, file: InputFile, text_key: str, step: int, findings: Findings) -> Iterator[Piece]:
        if self.open is not open_plain:
            step = file.size
        for start in range(0, file.size, step):
            stop = min(start + step, file.size)
            yield Piece(file, start, stop, stop - start)

    def documents(self, piece: Piece, text_key: str, reading: Reading) -> Iterator[str]:
        path = str(piece.file.path)
        number = 0
        with self.open(piece.file.path) as stream:
            reading.done_bytes = lambda: min(stream.raw.tell() - piece.start, piece.num_bytes)
            try:
                for number, (at, line) in enumerate(self._lines(piece, stream), start=1):
                    line = line.removeprefix(codecs.BOM_UTF8) if at == 0 else line
                    if line.strip():
                        place = Place(path, byte=at) if piece.start else Place(path, f"line {number:,}")
                        yield from _document(line, text_key, place, reading)
            except DamagedStreamError as error:
                detail = f"the file is damaged or truncated here ({error})"
                reading.add(Kind.DAMAGED_FILE, Place(path, f"line {number + 1:,}", detail=detail), DAMAGED)

    def _lines(self, piece: Piece, stream: Stream) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that begin in the piece, each with the byte at which it begins."""
        is_cut = piece.num_bytes < piece.file.size
        at = piece.start
        if at:
            stream.content.seek(at - 1)
            at += len(stream.content.readline()) - 1
        for line in stream.content:
            if is_cut and at >= piece.stop:
                return
            yield at, line
            at += len(line)


@dataclass(frozen=True, slots=True)
class JsonFile(JsonLines):
    """A .json or .ndjson: lines of objects, as Megatron-LM takes them under this name, or another form, which is refused."""

    def pieces(self, file: InputFile, text_key: str, step: int, findings: Findings) -> Iterator[Piece]:
        form = json_form(file.path, self.open)
        if form is JsonForm.LINES:
            yield from JsonLines.pieces(self, file, text_key, step, findings)
        else:
            command, result = lines_command(file.path)
            advice = (
                f"Of JSON, lines are read, a document each. If it holds documents, write them as lines with\n  {command}\n"
                f"and give {result} to --input."
            )
            findings.add(Kind.OTHER_FORMAT, Place(str(file.path), detail=f"holds {form.value}, not lines"), advice)


class JsonForm(Enum):
    """The form of a JSON file."""

    LINES = "lines of values"
    ARRAY = "a JSON array"
    OBJECT = "a JSON object over several lines"


def json_form(path: Path, opener: Opener = open_plain) -> JsonForm:
    """Return the form of a file by its first line, of which HEAD_BYTES are read.

    Raises:
        OSError: the file cannot be opened or read.
    """
    try:
        with opener(path) as stream:
            head = stream.content.read(HEAD_BYTES)
    except DamagedStreamError:
        return JsonForm.LINES  # which are read up to the damage
    first, end_of_line, _ = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    if first.startswith(b"["):
        return JsonForm.ARRAY
    is_open = end_of_line and first.startswith(b"{") and first.rstrip().endswith((b"{", b"[", b",", b":"))
    return JsonForm.OBJECT if is_open else JsonForm.LINES


def _document(line: bytes, text_key: str, place: Place, reading: Reading) -> Iterator[str]:
    """Yield the document of a line, or add the line to the findings."""
    try:
        kind, detail, text = _parse(line, text_key)
    except ValueError as error:
        kind = Kind.NOT_UTF8 if isinstance(error, UnicodeDecodeError) else Kind.NOT_JSON
        detail, text = str(error), ""
    if kind is None:
        yield text
    else:
        example = f'{{"{text_key}": "some text"}}'
        advice = f"Each line of a .jsonl is one document, for example {example}; --text-key names another field."
        reading.add(kind, replace(place, detail=detail), advice)


def _parse(line: bytes, text_key: str) -> tuple[Kind | None, str, str]:
    """Return the kind of fault and its detail, or None and the document; ValueError where a line is no JSON."""
    value = parse_json(line.decode())
    if not isinstance(value, dict) or text_key not in value:
        names = ", ".join(map(repr, value)) if isinstance(value, dict) else f"a {type(value).__name__}"
        return Kind.NO_FIELD, f"it has no field {text_key!r}, but {names or 'no field'}", ""
    text = value[text_key]
    if not isinstance(text, str):
        return Kind.NOT_TEXT, f"the field {text_key!r} is a {type(text).__name__}, not text", ""
    if not text:
        return Kind.EMPTY_DOCUMENT, f"the field {text_key!r} is empty", ""
    if not _is_unicode(text):
        return Kind.NOT_UNICODE, f"the field {text_key!r} has half a surrogate pair, which is no character", ""
    return None, "", text


def _is_unicode(text: str) -> bool:
    """Return false for a lone surrogate, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


READERS: dict[str, Reader] = {
    ".txt": WholeText(open_plain),
    ".txt.gz": WholeText(open_gzip),
    ".txt.zst": WholeText(open_zstandard),
    ".jsonl": JsonLines(open_plain),
    ".jsonl.gz": JsonLines(open_gzip),
    ".jsonl.zst": JsonLines(open_zstandard),
    ".json": JsonFile(open_plain),
    ".json.gz": JsonFile(open_gzip),
    ".json.zst": JsonFile(open_zstandard),
    ".ndjson": JsonFile(open_plain),
    ".ndjson.gz": JsonFile(open_gzip),
    ".ndjson.zst": JsonFile(open_zstandard),
    ".parquet": Parquet(),
    ".gz": WholeText(open_gzip),
    ".zst": WholeText(open_zstandard),
}
"""The format of each ending, in small letters; the longest that fits counts. A folder is searched for these."""
ANY_OTHER = READERS[".txt"]


def reader_of(path: Path) -> Reader:
    """Return the reader of a file, by the ending of its name; any other name is one document of text."""
    ending = ending_of(path)
    return READERS.get(ending) or REFUSED.get(ending) or ANY_OTHER


def ending_of(path: Path) -> str:
    """Return the longest ending of READERS and REFUSED that the name has, in small letters; "" for any other name."""
    name = path.name.lower()
    return max((ending for ending in (*READERS, *REFUSED) if name.endswith(ending)), key=len, default="")
