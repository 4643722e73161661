"""Writes to the terminal of a training run, which may be paused, full or gone, from a thread of its own.

    the terminal                      what happens
    blocks (Ctrl-S, a paused less)    bytes wait up to a bound; then lines are lost, and a later line says how many
    has no room (ENOSPC, ...)         the same, and the thread tries again every RETRY_SECONDS
    fails (EPIPE, EIO, ...)           its lines are lost

A write never waits for the terminal: the thread may block. O_NONBLOCK is never set, because it would affect other programs on the
terminal.
"""

import errno
import os
import threading
from typing import Any

from triaxis.engine.telemetry.outlets.lossy_file import Gap, LossyFile, OutputStream

MOST_BYTES = 1 << 20
"""Bytes that wait for a paused terminal; they hold some thousand lines."""

RETRY_SECONDS = 0.5
"""Time between two tries to write to a full disk."""

END_SECONDS = 2.0
"""Time for the terminal to take what waits, before a process ends."""

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that pass once the file system has room again."""

PAUSED = "the terminal was paused; the log of the rank has them"


class Terminal(OutputStream):
    """A binary stream to a terminal, pipe or file. Writes neither fail nor block.

    Args:
        descriptor: descriptor to write to. The stream uses a copy of it.
    """

    name = "terminal"

    def __init__(self, descriptor: int) -> None:
        super().__init__(os.dup(descriptor))
        self._file = LossyFile(self._descriptor, most_bytes=MOST_BYTES)
        # A signal handler may print in the middle of another print on the same thread.
        self._changed = threading.Condition(threading.RLock())
        self._queue = b""
        self._gap = Gap()
        self._last = b""
        self._is_busy = self._is_paused = self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)
        self._thread.start()

    @property
    def error(self) -> OSError | None:
        """The last write's error; None after a write that succeeded."""
        return self._file.error

    @property
    def num_lost(self) -> int:
        """Number of lines that were lost because of errors."""
        return self._file.num_lost

    @property
    def is_gone(self) -> bool:
        """Whether the terminal has failed for good."""
        return self.error is not None and self.error.errno not in NO_ROOM

    def write(self, data: Any) -> int:
        """Queue `data`, or count its lines as lost if too many bytes wait. Return the number of bytes in `data`."""
        given = bytes(data)
        with self._changed:
            rest = self._gap.rest(given)
            if self._gap.num_lines or len(self._queue) + len(rest) > MOST_BYTES:
                self._gap.lose(rest)
            else:
                self._queue += rest
            self._changed.notify()
        return len(given)

    def retry(self) -> None:
        """Do nothing: the thread tries again by itself."""

    def drain(self) -> None:
        """Wait until all is written, for `END_SECONDS` at most. If that was too short, later calls do not wait until it is."""
        with self._changed:
            is_done = self._changed.wait_for(lambda: not self._has_more(), 0.0 if self._is_paused else END_SECONDS)
            self._is_paused = not is_done

    def finish(self) -> None:
        """Write what waits, for `END_SECONDS` at most, and end the thread."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        self._thread.join(END_SECONDS)

    def _has_more(self) -> bool:
        return bool(self._is_busy or self._queue or self._gap.num_lines)

    def _run(self) -> None:
        while chunk := self._next_chunk():
            self._file.write(chunk)
            self._last = chunk[-1:]
        os.close(self._descriptor)

    def _next_chunk(self) -> bytes:
        """Take the next bytes to write, or the number of lines lost after them. Return b"" at the end."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            while not self._has_more():
                if self._is_ending:
                    return b""
                if not self._changed.wait(None if self.error is None else RETRY_SECONDS):
                    self._file.retry()
            self._is_busy = True
            if not self._queue:
                return self._gap.report(PAUSED, after=self._last)
            chunk, self._queue = self._queue, b""
            return chunk
