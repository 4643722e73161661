"""Open files as byte streams, decompressed on the fly if needed, and split them into records.

A file is decompressed if its first bytes or its name say that it is compressed. A compressed file can only be read from its
beginning. Reading a damaged file yields the bytes before the damage, then raises `DamagedStreamError`.
"""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from triaxis.engine.data.corpus.optional import need
from triaxis.engine.data.corpus.pieces import Piece

BLOCK_BYTES = 2**20
COMPRESSED_BYTES = 2**17
"""Bytes read at a time from a .zst; all of them are decompressed at once, to perhaps many times as many bytes."""
GZIP, ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""First bytes in compressed files (RFC 1952, RFC 8878)."""
RECORD_BLOCK_BYTES = 2**16
"""Bytes read at a time when splitting records: up to this many are read twice at the border between two pieces."""
LARGEST_ZSTANDARD_WINDOW = 2**31
"""Largest accepted window in bytes, as `zstd --ultra --long=31` uses. The library's own default limit is 2^27."""


class DamagedStreamError(Exception):
    """A compressed file that ends too early, or whose content does not match its checksum or format."""


@dataclass(slots=True)
class Stream:
    """An open input file: `content` reads its decompressed bytes, `raw` measures the progress on disk."""

    content: io.BufferedReader
    """The file's bytes, decompressed."""
    raw: BinaryIO
    """The file on disk; its position measures the progress."""


Decompress = Callable[[BinaryIO], Iterator[bytes]]


@contextmanager
def open_stream(path: Path) -> Iterator[Stream]:
    """Open an input file, which may be a .gz of several members or a .zst of several frames.

    Reading a .zst raises DataError if the package zstandard is not installed.

    Raises:
        OSError: the file cannot be read.
    """
    decompress = decompress_of(path)
    with path.open("rb") as raw:
        yield Stream(raw if decompress is None else io.BufferedReader(_Blocks(decompress(raw)), BLOCK_BYTES), raw)


def decompress_of(path: Path) -> Decompress | None:
    """Choose how a file is decompressed, by the file's first bytes or else by its name; None for a plain file.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as handle:
        head = handle.read(len(ZSTANDARD))
    if head.startswith(GZIP) or (path.name.lower().endswith(".gz") and head != ZSTANDARD):
        return _gzip_blocks
    return _zstandard_blocks if head == ZSTANDARD or path.name.lower().endswith(".zst") else None


def split_at(separator: bytes, stream: Stream, piece: Piece) -> Iterator[tuple[int, bytes | None]]:
    """Yield (offset in the decompressed file, content) for each record that begins in a piece.

    The content is None if the record is too large. A record begins at the file's start or after a separator, so each record belongs
    to exactly one piece. Reading starts one separator's length before the piece, to find a separator that ends where the piece
    begins.
    """
    # held: bytes read but not yet yielded; searched: leading bytes in `held` without a separator; dropped: an oversized record's
    # bytes already thrown away.
    held, dropped, searched = bytearray(), 0, 0
    is_cut, limit = piece.num_bytes < piece.file.size, piece.file.options.max_document_bytes
    at = max(0, piece.start - len(separator))
    if at:
        stream.content.seek(at)
    while block := stream.content.read1(RECORD_BLOCK_BYTES):
        held += block
        while (end := held.find(separator, searched)) >= 0:
            if at >= piece.start:
                yield at, None if dropped + end > limit else bytes(held[:end])
            at += dropped + end + len(separator)
            if is_cut and at >= piece.stop:
                return
            del held[: end + len(separator)]
            dropped = searched = 0
        searched = max(0, len(held) - len(separator) + 1)
        if dropped + searched > limit:
            dropped += searched
            del held[:searched]
            searched = 0
    if held and at >= piece.start:
        yield at, None if dropped + len(held) > limit else bytes(held)


def _gzip_blocks(raw: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=raw) as handle:
        try:
            # read1 returns at each block; read() would lose the blocks before the damage.
            while block := handle.read1(BLOCK_BYTES):
                yield block
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DamagedStreamError(str(error)) from error


def _zstandard_blocks(raw: BinaryIO) -> Iterator[bytes]:
    """Yield a .zst's decompressed bytes. The library's own reader would mistake a truncated frame for the file's end."""
    zstandard = need("zstandard", f"{raw.name}, a .zst,")
    decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_ZSTANDARD_WINDOW)
    frame: Any = None
    while data := raw.read(COMPRESSED_BYTES):
        while data:
            frame = frame or decompressor.decompressobj()
            try:
                yield frame.decompress(data)
            except zstandard.ZstdError as error:
                raise DamagedStreamError(str(error)) from error
            data = b""
            if frame.eof:
                frame, data = None, frame.unused_data
    if frame is not None:
        raise DamagedStreamError("the file ends in the middle of a frame")


class _Blocks(io.RawIOBase):
    """A raw file that reads from an iterator of blocks, so that BufferedReader can wrap it."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            try:
                self._rest = memoryview(next(self._blocks))
            except StopIteration:
                return 0
        count = min(len(target), len(self._rest))
        target[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count
