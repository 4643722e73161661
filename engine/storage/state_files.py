"""Small files that a run keeps for itself, read in bounded time and memory whatever has their names (no torch here).

A read of a FIFO waits for a writer, a device may have no end, and a damaged file may have any size and encoding. Folders that
cannot be used are explained in words.
"""

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from engine.errors import StorageError
from engine.storage.json_text import parse_json

MOST_BYTES = 16 * 2**20
"""Largest state file that is read; `finished` has some hundred bytes, and a job's history some hundred per attempt."""

_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE})
"""Errors that may be over at the next start."""

_KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def kind_of(mode: int) -> str:
    """Name the kind of an entry from its `st_mode`."""
    return _KINDS.get(stat.S_IFMT(mode), "no regular file")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read it; never waits for a writer, as opening a FIFO would.

    Raises:
        OSError: it is not there, cannot be read, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a whole regular file.

    Raises:
        OSError: it is not there, cannot be read, is no regular file, or has more than `most_bytes`.
    """
    with open_regular(path) as file:
        is_large = os.fstat(file.fileno()).st_size > most_bytes
        content = b"" if is_large else file.read(most_bytes + 1)
    if is_large or len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return content


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None where there is no such entry.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than `MOST_BYTES`.
        ValueError: it holds no JSON object.
    """
    try:
        value = parse_json(read_regular(path))
    except FileNotFoundError:
        return None
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value


def reason(error: OSError | ValueError) -> str:
    """Say in a few words why a file could not be read or written."""
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.strerror or error}" + (f" ({os.fsdecode(error.filename)})" if error.filename else "")


@contextmanager
def explaining_storage(path: Path, purpose: str, advice: str) -> Iterator[None]:
    """Turn an error of the file system into words.

    Args:
        path: what the block uses.
        purpose: what the run writes there, to complete "cannot be used for".
        advice: what to do, a sentence.

    Raises:
        StorageError: an OSError left the block.
    """
    try:
        yield
    except OSError as error:
        obstacle = _obstacle(path)
        why = f"{obstacle} is not a folder" if obstacle is not None else reason(error)
        raise StorageError(
            f"{path} cannot be used for {purpose}: {why}. {advice}", is_passing=error.errno in _PASSING
        ) from error


def try_to_write(folder: Path) -> None:
    """Write and remove a byte in a folder, or in the nearest one above it that is there; leaves nothing behind.

    Raises:
        OSError: nothing can be written there.
    """
    place = folder
    while not os.path.lexists(place) and place != place.parent:
        _check_name(place)
        place = place.parent
    if not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    with tempfile.TemporaryFile(dir=place) as file:
        file.write(b"\0")
        file.flush()


def _check_name(path: Path) -> None:
    """Raise where a path can never exist: a name or the whole is too long, say."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return


def _obstacle(path: Path) -> Path | None:
    """The nearest existing entry of a path, if it is no folder."""
    for place in (path, *path.parents):
        try:
            mode = place.stat().st_mode
        except OSError:
            continue
        return None if stat.S_ISDIR(mode) else place
    return None
