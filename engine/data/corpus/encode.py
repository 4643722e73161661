"""The work of one worker of `triaxis prepare`: read a unit of text and encode it (no torch here).

    unit = pieces of files  -->  document . eod | document . eod | ...   as bytes of the corpus's dtype, and their lengths

A piece of a .jsonl is a range of bytes that may begin and end inside a line; a line belongs to the piece with its first byte.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from engine.data.corpus.tokenizers import Tokenizer, load_tokenizer
from engine.errors import DataError
from engine.storage.json_text import parse_json

# A worker encodes many units with one tokenizer, whose .json may take a second to parse.
_loaded = lru_cache(maxsize=1)(load_tokenizer)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `stop` - 1 of a file: a whole text file, or a part of a file of lines."""

    path: Path
    lines: bool
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


Unit = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class EncodedUnit:
    """Documents one after another, each with its end-of-document token."""

    data: bytes
    lengths: list[int]
    num_bytes: int
    """Bytes of input."""
    num_skipped: int
    """Documents without text."""


def start_worker() -> None:
    """Prepare a new worker: it ends when its parent ends, however that happened, and leaves Ctrl-C to the parent.

    A worker waits for work on a pipe that its siblings hold open too, so a killed parent would not wake it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def encode_unit(unit: Unit, tokenizer_name: str, eod_token: str | None, json_key: str, dtype: str) -> EncodedUnit:
    """Read and encode a unit.

    Raises:
        DataError: bytes that are no UTF-8, or a line that is no JSON object with a text under `json_key`.
    """
    tokenizer: Tokenizer = _loaded(tokenizer_name, eod_token)
    parts: list[bytes] = []
    lengths: list[int] = []
    num_skipped = 0
    for piece in unit:
        for text in _lines(piece, json_key) if piece.lines else [_whole(piece)]:
            if not text:
                num_skipped += 1
                continue
            ids = np.array([*tokenizer.encode(text), tokenizer.eod_id], dtype)
            parts.append(ids.tobytes())
            lengths.append(len(ids))
    return EncodedUnit(b"".join(parts), lengths, sum(piece.num_bytes for piece in unit), num_skipped)


def _whole(piece: Piece) -> str:
    content = piece.path.read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{piece.path} is no UTF-8 text: byte {error.start:,} is 0x{content[error.start]:02x}. Guessing would train on "
            f"wrong characters. Convert it first (iconv -f latin1 -t utf-8), or leave it out."
        ) from error


def _lines(piece: Piece, json_key: str) -> Iterator[str]:
    """Yield the documents of the lines that begin in the piece; blank lines are none."""
    with piece.path.open("rb") as handle:
        if piece.start:
            handle.seek(piece.start - 1)
            handle.readline()
        while (at := handle.tell()) < piece.stop:
            line = handle.readline()
            if line.strip():
                try:
                    yield _text(line, json_key)
                except ValueError as error:
                    raise DataError(
                        f"{piece.path}, line {_line_number(handle, at):,}: {error}. Each line of a .jsonl is one document, for "
                        f'example {{"{json_key}": "some text"}}; --json-key names another field.'
                    ) from error


def _text(line: bytes, json_key: str) -> str:
    """Return the document of a line; raise ValueError (or a kind of it, for undecodable bytes and broken JSON)."""
    value = parse_json(line.decode())
    if not isinstance(value, dict) or json_key not in value:
        names = ", ".join(map(repr, value)) if isinstance(value, dict) else f"a {type(value).__name__}"
        raise ValueError(f"it has no field {json_key!r}, but {names or 'no field'}")
    if not isinstance(value[json_key], str):
        raise ValueError(f"the field {json_key!r} is a {type(value[json_key]).__name__}, not text")
    return str(value[json_key])


def _line_number(handle: BinaryIO, at: int) -> int:
    """Return the number, from 1, of the line that begins at byte `at`."""
    handle.seek(0)
    number = 1
    while handle.tell() < at:
        handle.readline()
        number += 1
    return number
