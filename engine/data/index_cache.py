"""Numbers that take long to compute, once per node, in a hashed cache file (no torch here).

    file:  magic (8 bytes) | sha256 of key and numbers (32) | int64 numbers

All processes of a node share the file by mmap. A truncated, damaged or foreign file does not match its hash and is built again.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triaxis.engine.errors import DataError
from triaxis.engine.storage.files import HASH_BLOCK_BYTES, locked, write_atomically

MAGIC = b"TRXEPOC1"
DIGEST_BYTES = 32
logger = logging.getLogger(__name__)


def key_digest(key: str) -> str:
    """Return the part of a file's name that names its key."""
    return hashlib.sha256(key.encode()).hexdigest()[:20]


def open_numbers(
    path: Path, key: str, build: Callable[[], Sequence[NDArray[np.int64]]], count: int | None, lock: str = ".lock"
) -> NDArray[np.int64]:
    """Return the numbers of a cache file, int64, which the first process of a node builds while the others wait.

    Args:
        path: of the file.
        key: text of all that decides the numbers.
        build: returns the arrays that are written behind each other.
        count: how many numbers there are; None: as many as there are in the file.
        lock: name of the file that is locked meanwhile; `build` may open numbers under another one.

    Raises:
        DataError: the cache folder cannot be read or written.
    """
    try:
        if (numbers := _load(path, key, count)) is not None:
            return numbers
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent / lock):
            if (numbers := _load(path, key, count)) is not None:
                return numbers
            if path.exists():
                logger.warning("index cache %s is truncated or damaged: building it again", path)
            payload = [np.ascontiguousarray(part, np.int64).data.cast("B") for part in build()]
            count = sum(len(part) for part in payload) // 8
            write_atomically(path, [MAGIC, _digest(key, payload), *payload])
    except OSError as error:
        room = "" if count is None else f", with {8 * count:,} bytes free per epoch"
        raise DataError(
            f"the index cache {path} cannot be read or written ({error.strerror or error}). Every run needs it, once per node. Set "
            f"data.cache_dir to a folder that this user can write{room}."
        ) from error
    numbers = _load(path, key, count)
    if numbers is None:
        raise DataError(
            f"the index cache {path} does not hold what was just written to it: the disk or the file system is unreliable. "
            f"Set data.cache_dir to a folder on another one."
        )
    return numbers


def _digest(key: str, payload: Sequence[memoryview]) -> bytes:
    digest = hashlib.sha256(key.encode())
    for part in payload:
        for start in range(0, len(part), HASH_BLOCK_BYTES):
            digest.update(part[start : start + HASH_BLOCK_BYTES])
    return digest.digest()


def _load(path: Path, key: str, count: int | None) -> NDArray[np.int64] | None:
    """Return the numbers of a cache file, or None if it is missing or does not match its key."""
    start = len(MAGIC) + DIGEST_BYTES
    try:
        size = path.stat().st_size
        if size < start or (size - start) % 8 or count not in (None, (size - start) // 8):
            return None
        content = np.memmap(path, dtype=np.uint8, mode="r")
    except (FileNotFoundError, NotADirectoryError):
        return None
    if content[:start].tobytes() != MAGIC + _digest(key, [content[start:].data]):
        return None
    return content[start:].view("<i8")
