"""Reads a run's small state files in bounded time and memory.

Reading a FIFO would wait for a writer, and a device or a damaged file may have any size.
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
"""Maximum bytes in a state file; a run's file `finished` has some hundred bytes, a job's history some hundred per attempt."""

MOST_TEXT_BYTES = 2**30
"""Maximum bytes in a user's text file."""

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
    """Name the kind of a folder entry ("a FIFO", "a socket", ..), given its `st_mode`."""
    return _KINDS.get(stat.S_IFMT(mode), "no regular file")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, without waiting for a writer as a FIFO would.

    Raises:
        OSError: the file is missing, unreadable, or not a regular file.
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
        OSError: the file is missing, unreadable, not a regular file, or larger than `most_bytes`.
    """
    with open_regular(path) as file:
        is_large = os.fstat(file.fileno()).st_size > most_bytes
        # One read of `most_bytes` would allocate them all, however small the file is.
        blocks = range(0 if is_large else most_bytes // _BLOCK_BYTES + 1)
        content = b"".join(takewhile(bool, (file.read(_BLOCK_BYTES) for _ in blocks)))
    if is_large or len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return content


def read_text(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """Read a user's text file as UTF-8, with line ends as `\\n`.

    Raises:
        OSError: see `read_regular`.
        UnicodeDecodeError: the text is not UTF-8.
    """
    return io.StringIO(read_regular(path, most_bytes).decode(), newline=None).read()


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if the path does not exist.

    Raises:
        OSError: the file is unreadable, not a regular file, or larger than `MOST_BYTES`.
        ValueError: the file does not hold a JSON object.
    """
    try:
        value = parse_json(read_regular(path))
    except FileNotFoundError:
        return None
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value


def reason(error: OSError | ValueError) -> str:
    """Describe in a few words why a file could not be read or written."""
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.strerror or error}" + (f" ({os.fsdecode(error.filename)})" if error.filename else "")


def is_passing(error: BaseException | None) -> bool:
    """Whether an error was caused by a file-system problem that may pass, such as a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _PASSING:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def explaining_storage(path: Path, purpose: str, advice: str) -> Iterator[None]:
    """Turn a file-system error into a StorageError with an explanation.

    Args:
        path: path that the block uses.
        purpose: what the path is used for; completes "cannot be used for".
        advice: sentence that tells the user what to do.

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
    """Write a byte in a folder, or in its nearest existing parent, and remove it.

    Raises:
        OSError: the place is not a writable folder, or the path can never exist.
    """
    place = folder
    while not os.path.lexists(place) and place != place.parent:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(place)  # raises if the path can never exist, for example if a name is too long
        place = place.parent
    if not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    with tempfile.TemporaryFile(dir=place) as file:
        file.write(b"\0")
        file.flush()


def _obstacle(path: Path) -> Path | None:
    """Find the first existing path among `path` and its parents. None if that path is a folder."""
    for place in (path, *path.parents):
        try:
            mode = place.stat().st_mode
        except OSError:
            continue
        return None if stat.S_ISDIR(mode) else place
    return None
