"""Small state files of a run, read in bounded time and memory whatever is in their place.

A read of a FIFO waits for a writer, a device may be endless, and a damaged file may have any size and encoding.
"""

import errno
import io
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

from triaxis.engine.errors import StorageError
from triaxis.engine.storage.json_text import parse_json

MOST_BYTES = 16 * 2**20
"""Largest state file; `finished` has some hundred bytes, and a job's history some hundred per attempt."""

MOST_TEXT_BYTES = 2**30
"""Largest text file of a user."""

_BLOCK_BYTES = 2**20
_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE})
"""Errors that may be gone at the next start."""

_KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def kind_of(mode: int) -> str:
    """Return the kind of an entry in words, from its `st_mode`."""
    return _KINDS.get(stat.S_IFMT(mode), "no regular file")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; never wait for a writer, as opening a FIFO would.

    Raises:
        OSError: it is missing, unreadable, or no regular file.
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
        OSError: it is missing, unreadable, no regular file, or has more than `most_bytes`.
    """
    with open_regular(path) as file:
        is_large = os.fstat(file.fileno()).st_size > most_bytes
        # A read of so many bytes at once would allocate them, whatever the file has.
        blocks = range(0 if is_large else most_bytes // _BLOCK_BYTES + 1)
        content = b"".join(takewhile(bool, (file.read(_BLOCK_BYTES) for _ in blocks)))
    if is_large or len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return content


def read_text(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """Read a text file of a user as UTF-8, with line ends as `\\n`.

    Raises:
        OSError: as of `read_regular`.
        UnicodeDecodeError: it is no text in UTF-8.
    """
    return io.StringIO(read_regular(path, most_bytes).decode(), newline=None).read()


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; return None where there is no such entry.

    Raises:
        OSError: it is unreadable, no regular file, or has more than `MOST_BYTES`.
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
    """Return in a few words why a file could not be read or written."""
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.strerror or error}" + (f" ({os.fsdecode(error.filename)})" if error.filename else "")


def is_passing(error: BaseException | None) -> bool:
    """Return whether an error is, or was raised for, one of the file system that may be gone at the next start: a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _PASSING:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def explaining_storage(path: Path, purpose: str, advice: str) -> Iterator[None]:
    """Raise an error of the file system as a StorageError with an explanation.

    Args:
        path: the path that the block uses.
        purpose: use of the path, to complete "cannot be used for".
        advice: a sentence for the user.

    Raises:
        StorageError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        obstacle = _obstacle(path)
        why = f"{obstacle} is not a folder" if obstacle is not None else reason(error)
        raise StorageError(
            f"{path} cannot be used for {purpose}: {why}. {advice}", is_passing=is_passing(error)
        ) from error


def try_to_write(folder: Path) -> None:
    """Write and remove a byte in a folder, or in its nearest existing parent; leave nothing behind.

    Raises:
        OSError: the place is not writable.
    """
    place = folder
    while not os.path.lexists(place) and place != place.parent:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(place)  # raises where a path can never exist, for example where a name is too long
        place = place.parent
    if not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    with tempfile.TemporaryFile(dir=place) as file:
        file.write(b"\0")
        file.flush()


def _obstacle(path: Path) -> Path | None:
    """Return the nearest existing entry of a path, if it is no folder."""
    for place in (path, *path.parents):
        try:
            mode = place.stat().st_mode
        except OSError:
            continue
        return None if stat.S_ISDIR(mode) else place
    return None
