"""Writes files that are complete or absent, and locks work that one process does per node.

    write:  path.partial  --write, flush, fsync-->  --rename-->  path  --fsync of the folder-->  it survives a power cut
    build:  rank 0, 1, ... of a node  --flock on one lock file-->  the first builds, the others find it built

A reader never sees half a file, and a crash leaves at most a `.partial` file.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

HASH_BLOCK_BYTES = 8 * 2**20


def write_atomically(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write `parts` in order as the new content of `path`: all of it, or nothing.

    Processes without a common lock do not disturb each other; the later rename wins.

    Raises:
        OSError: the folder cannot be written, or the disk is full. `path` is unchanged, unless only the folder's sync failed.
    """
    partial = path.with_name(f"{path.name}.{os.uname().nodename}-{os.getpid()}.partial")
    try:
        with partial.open("wb") as handle:
            for part in parts:
                handle.write(part)
            handle.flush()
            sync(handle.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync(descriptor: int) -> None:
    """Sync a file's content to disk. A file renamed before its sync could be empty after a crash."""
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries (the renames in it) to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_LOOK_SECONDS = 0.2
"""Seconds between two attempts to get a lock."""


@contextmanager
def locked(path: Path, waits: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the exclusive lock on the file `path`, which is created if missing and never removed.

    The kernel releases the lock when its holder dies. On file systems without working locks there may be two holders at once. So
    holders must write safely even then, for example with `write_atomically`.

    Args:
        path: the lock file.
        waits: called every `_LOOK_SECONDS` while another process holds the lock; None: block until it is free.
    """
    with path.open("a") as handle:
        while waits is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waits()
                time.sleep(_LOOK_SECONDS)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def sha256_of_file(path: Path) -> str:
    """Compute a whole file's SHA-256, in hexadecimal (about 2 GB/s on one core)."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
