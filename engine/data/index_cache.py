"""Keeps slowly computed numbers in a hashed cache file, built once per node.

    file:  magic (8 bytes) | sha256 of key and numbers (32) | int64 numbers

All processes on a node share the file by mmap. A truncated, damaged or foreign file does not match its hash and is built again.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triaxis.engine.errors import DataError
from triaxis.engine.storage.files import HASH_BLOCK_BYTES, locked, sync, sync_folder, write_atomically

MAGIC = b"TRXEPOC1"
DIGEST_BYTES = 32
HEAD_BYTES = len(MAGIC) + DIGEST_BYTES
logger = logging.getLogger(__name__)


class Progress:
    """An observer for slow operations. This base class ignores every notification."""

    def piece(self, path: Path, done: int, of: int) -> None:
        """Called when this process has finished `done` of `of` pieces of a cache file."""

    def waits(self, path: Path) -> None:
        """Called repeatedly while another process on the node builds the cache file."""

    def hashes(self, path: Path) -> None:
        """Called after each block of a cache file that this process has hashed."""

    def ends(self) -> None:
        """Called at the end of each `open_numbers` call, successful or not."""


def key_digest(key: str) -> str:
    """Hash a key to 20 hexadecimal digits for a file name."""
    return hashlib.sha256(key.encode()).hexdigest()[:20]


def open_numbers(
    path: Path,
    key: str,
    build: Callable[[], Sequence[NDArray[np.int64]] | None],
    count: int | None,
    lock: str = ".lock",
    progress: Progress | None = None,
) -> NDArray[np.int64]:
    """Open a cache file's int64 numbers.

    The first process on a node builds the file while the others wait.

    Args:
        path: path of the cache file.
        key: text of all inputs from which the numbers follow; a file with another key is built anew.
        build: function () -> arrays to write one after another, or None if the function wrote the file with `seal`.
        count: expected number of int64 values; None accepts any.
        lock: name of the lock file held while building; an `open_numbers` call within `build` needs another lock.
        progress: observer for building, waiting and hashing.

    Raises:
        DataError: the cache folder cannot be read or written, or the file does not hold what was just written.
    """
    progress = progress or Progress()
    hashed = partial(progress.hashes, path)
    try:
        if (numbers := _load(path, key, count, hashed)) is not None:
            return numbers
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent / lock, partial(progress.waits, path)):
            if (numbers := _load(path, key, count, hashed)) is not None:
                return numbers
            if path.exists():
                logger.warning("index cache %s is truncated or damaged: building it again", path)
            if (parts := build()) is not None:
                payload = [np.ascontiguousarray(part, np.int64).data.cast("B") for part in parts]
                count = sum(len(part) for part in payload) // 8
                write_atomically(path, [MAGIC, _digest(key, payload, hashed), *payload])
        numbers = _load(path, key, count, hashed)
    except OSError as error:
        room = "" if count is None else f", with {8 * count:,} bytes free per epoch"
        raise DataError(
            f"the index cache {path} cannot be read or written ({error.strerror or error}). Every run needs it, once per node. Set "
            f"data.cache_dir to a folder that this user can write{room}."
        ) from error
    finally:
        progress.ends()
    if numbers is None:
        raise DataError(
            f"the index cache {path} does not hold what was just written to it: the disk or the file system is unreliable. "
            f"Set data.cache_dir to a folder on another one."
        )
    return numbers


def seal(building: Path, path: Path, key: str, progress: Progress) -> None:
    """Turn the file `building` into the cache file at `path`.

    `building` holds HEAD_BYTES of free space for the magic and the hash, then the numbers.

    Raises:
        OSError: the file cannot be written.
    """
    with building.open("r+b") as file:
        content = np.memmap(building, dtype=np.uint8, mode="r", offset=HEAD_BYTES)
        file.write(MAGIC + _digest(key, [content.data], partial(progress.hashes, path)))
        file.flush()
        sync(file.fileno())
    building.replace(path)
    sync_folder(path.parent)


def _digest(key: str, payload: Sequence[memoryview], hashed: Callable[[], None]) -> bytes:
    """Hash a key and numbers with sha256, and call `hashed` after each block."""
    digest = hashlib.sha256(key.encode())
    for part in payload:
        for start in range(0, len(part), HASH_BLOCK_BYTES):
            digest.update(part[start : start + HASH_BLOCK_BYTES])
            hashed()
    return digest.digest()


def _load(path: Path, key: str, count: int | None, hashed: Callable[[], None]) -> NDArray[np.int64] | None:
    """Map a cache file's numbers, or return None if the file is missing or invalid."""
    start = HEAD_BYTES
    try:
        size = path.stat().st_size
        if size < start or (size - start) % 8 or count not in (None, (size - start) // 8):
            return None
        content = np.memmap(path, dtype=np.uint8, mode="r")
    except (FileNotFoundError, NotADirectoryError):
        return None
    if content[:start].tobytes() != MAGIC + _digest(key, [content[start:].data], hashed):
        return None
    return content[start:].view("<i8")
