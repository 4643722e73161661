"""Locks a folder, so that only one process at a time writes there.

    runs/demo/lock                 held by rank 0 of the run while it lives
    runs/demo/checkpoints/lock     held by the run or the conversion that writes there

The kernel releases a lock when the process that holds it dies. A lock belongs to the file, not to the file's name. After the folder
was removed or moved, another process can lock a new file with the same name. `is_in_place` detects this case.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from triaxis.engine.errors import TriaxisError
from triaxis.engine.storage.state_files import kind_of

LOCK = "lock"


class FolderLock:
    """The lock on one folder, held until `close`.

    On a file system without locks, it keeps no other process out.

    Args:
        folder: an existing folder.
        advice: clause that offers the user an alternative if another process holds the lock.

    Raises:
        TriaxisError: another process holds the lock, or `lock` in the folder is not a regular file.
        OSError: the lock cannot be opened.
    """

    def __init__(self, folder: Path, advice: str) -> None:
        self.folder = folder
        self._advice = advice
        self._descriptor: int | None = _lock(folder, advice)

    def is_in_place(self) -> bool:
        """Whether the folder still holds the locked file.

        False after `close`, or after the folder was removed or moved. True if the file system does not answer.
        """
        if self._descriptor is None:
            return False
        try:
            there = (self.folder / LOCK).stat()
        except FileNotFoundError:
            return False
        except OSError:
            return True  # a server that does not answer has lost nothing yet
        return os.path.samestat(there, os.fstat(self._descriptor))

    def take_again(self) -> None:
        """Recreate and lock a folder that was removed or moved, and release the old lock.

        Raises:
            TriaxisError: another process has locked the folder in between.
            OSError: the folder or the lock cannot be created.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(self.folder, self._advice)
        self.close()
        self._descriptor = descriptor

    def close(self) -> None:
        """Release the lock, so that other processes can take it. A second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextmanager
def holding(folder: Path, advice: str) -> Iterator[None]:
    """Hold a folder's lock if a run has created one there. Otherwise do nothing.

    Raises:
        TriaxisError: another process holds the lock, or `lock` is not a regular file.
        OSError: the lock cannot be opened.
    """
    if not os.path.lexists(folder / LOCK):
        yield
        return
    lock = FolderLock(folder, advice)
    try:
        yield
    finally:
        lock.close()


def _lock(folder: Path, advice: str) -> int:
    """Lock a folder and return the descriptor that holds the lock."""
    descriptor = _open(folder / LOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise TriaxisError(
            f"another live run is writing to {folder}, and two runs would mix their files. Wait for it, stop it, or {advice}"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
            os.close(descriptor)
            raise
        # A file system without locks cannot keep two runs apart, but that is no reason not to train.
    return descriptor


def _open(path: Path) -> int:
    """Open or create the lock file without blocking. TriaxisError if it is not a regular file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except IsADirectoryError:
        raise _no_lock(path, "a folder") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _no_lock(path, kind_of(mode))
    return descriptor


def _no_lock(path: Path, kind: str) -> TriaxisError:
    return TriaxisError(
        f"{path} is {kind}, but it must be a regular file: it is the lock that keeps two runs apart. Remove or rename it, and "
        "give the command again."
    )
