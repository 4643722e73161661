"""Writes to a file or pipe that may refuse lines. They wait up to a bound; beyond it they are lost and counted, without an error.

step 7 ...
step 8 .                                              no room for the rest of this line, and nothing may wait
[3 lines are missing here: No space left on device]
step 11 ...                                           there is room again
"""

import errno
import io
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any


class Gap:
    """A gap in a stream of lines. `num_lines` counts lines that were lost and not reported yet."""

    def __init__(self) -> None:
        self.num_lines = 0
        self._inside_line = False

    def lose(self, data: bytes) -> None:
        """Count the lines in `data` as lost. A part of a line counts as a line."""
        if data:
            self.num_lines += data.count(b"\n")
            if not data.endswith(b"\n"):
                self.num_lines += 1
                self._inside_line = True

    def rest(self, data: bytes) -> bytes:
        """Drop the first bytes of `data` that end a line whose beginning was lost. Return the other bytes."""
        if not self._inside_line:
            return data
        _, newline, data = data.partition(b"\n")
        self._inside_line = not newline
        return data

    def report(self, cause: str, *, after: bytes) -> bytes:
        """Return the line that replaces the lost ones, and reset the count.

        `after` is the last byte written. Unless `after` is a newline or empty, the result starts with a newline.
        """
        lines = "1 line is" if self.num_lines == 1 else f"{self.num_lines} lines are"
        self.num_lines = 0
        begins = b"" if after in (b"", b"\n") else b"\n"
        return begins + f"[{lines} missing here: {cause}]\n".encode()


class Stamps:
    """Puts a local time stamp, as in 2026-11-26 08:27:31.123, before each line.

    Args:
        clock: function that returns seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._is_inside = False

    def put_on(self, data: bytes) -> bytes:
        """Put a time stamp before each line that begins in `data`."""
        if not data:
            return data
        seconds = self._clock()
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
        stamp = f"{at}.{int(seconds % 1 * 1000):03d} ".encode()
        first = b"" if self._is_inside else stamp
        self._is_inside = not data.endswith(b"\n")
        return first + data[:-1].replace(b"\n", b"\n" + stamp) + data[-1:]


LOOK_SECONDS = 1.0
"""Time between two checks of a log's path; each check is one system call."""

BEGINS_AGAIN = b"[this log begins again: its folder was removed or moved]\n"


class LogPath:
    """The path of an open log file. If the file was removed or moved, a new file takes its place.

    If another file has the path by then, that file belongs to another run and is left alone.

    Args:
        path: absolute path of the log.
        descriptors: the log's descriptors, all open for appending; a new file gets the same descriptor numbers.
        clock: function that returns seconds.
    """

    def __init__(self, path: str, descriptors: Sequence[int], clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._descriptors = tuple(descriptors)
        self._clock = clock
        self._next_look_seconds = clock() + LOOK_SECONDS

    def look(self) -> None:
        """Create the log file again if it is missing.

        A call does nothing for `LOOK_SECONDS` after a check. If the file could not be created, the next call checks again.
        """
        if self._clock() < self._next_look_seconds:
            return
        if not os.access(self._path, os.F_OK):
            try:
                self._make()
            except OSError:
                return  # no folder yet: the next write checks again
        self._next_look_seconds = self._clock() + LOOK_SECONDS

    def _make(self) -> None:
        """Create a new file and make the log's descriptor numbers refer to it.

        Raises:
            OSError: the file cannot be created.
        """
        made = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # a full disk: lines that follow are kept or counted as in any log
            os.write(made, BEGINS_AGAIN)
        for descriptor in self._descriptors:
            os.dup2(made, descriptor)
        os.close(made)


class OutputStream(io.RawIOBase):
    """A binary stream for writing to a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True


class LossyFile(OutputStream):
    """A binary stream over a descriptor, whose writes never fail. The stream does not own the descriptor.

    Args:
        descriptor: descriptor to write to.
        name: name of the output in events and messages.
        most_bytes: bytes that wait while the descriptor refuses them. Lines beyond that are lost.
        log: path to check before each write, because the log may be removed during the run; None if there is no log.
        stamps: time stamps for the lines; None writes lines unchanged.
        patience_seconds: time for which a write waits for a paused terminal or pipe. After that, lines are lost without waiting
            until there is room again. None means no limit.

    Attributes:
        error: the last write's error; None after a write that succeeded.
        num_lost: number of lines that were lost so far.
    """

    def __init__(
        self,
        descriptor: int,
        *,
        name: str = "",
        most_bytes: int = 0,
        log: LogPath | None = None,
        stamps: Stamps | None = None,
        patience_seconds: float | None = None,
    ) -> None:
        super().__init__(descriptor)
        self.name = name
        self.error: OSError | None = None
        self.num_lost = 0
        self._stamps = stamps
        self._most_bytes = most_bytes
        self._patience_seconds = patience_seconds
        self._is_paused = False
        self._log = log
        # A signal handler may print in the middle of another print on the same thread.
        self._lock = threading.RLock()
        self._waiting = b""
        self._gap = Gap()
        self._cause = ""
        self._last = b""

    def write(self, data: Any) -> int:
        """Write `data`. Keep or count the refused lines. Return the number of bytes in `data`."""
        given = bytes(data)
        with self._lock:
            if self._log is not None:
                self._log.look()
            self._write_waiting()
            rest = self._gap.rest(given if self._stamps is None else self._stamps.put_on(given))
            if self._gap.num_lines:
                self._lose(rest)
            else:
                self._waiting += rest
                self._write_waiting()
        return len(given)

    def retry(self) -> None:
        """Try again to write what waits."""
        with self._lock:
            self._write_waiting()

    def _write_waiting(self) -> None:
        """Write what waits, and then how many lines are missing after it."""
        while self._waiting or self._gap.num_lines:
            num_lost = 0 if self._waiting else self._gap.num_lines
            data, self._waiting = self._waiting or self._gap.report(self._cause, after=self._last), b""
            written, error = self._put(data)
            self._last = data[written - 1 : written] or self._last
            if error is not None:
                self.error, self._cause = error, error.strerror or str(error)
                self._gap.num_lines += num_lost
                self._keep(b"" if num_lost else data[written:])
                return
        self.error = None

    def _keep(self, rest: bytes) -> None:
        """Let refused bytes wait up to the bound, and lose the lines beyond it."""
        kept = len(rest) if len(rest) <= self._most_bytes else rest.rfind(b"\n", 0, self._most_bytes) + 1
        self._waiting = rest[:kept] + self._waiting
        self._lose(rest[kept:])

    def _lose(self, data: bytes) -> None:
        before = self._gap.num_lines
        self._gap.lose(data)
        self.num_lost += self._gap.num_lines - before

    def _put(self, data: bytes) -> tuple[int, OSError | None]:
        """Write `data`. Return the number of bytes written, and the error if some bytes were refused."""
        written, most = 0, len(data)
        if self._patience_seconds is not None:
            # A terminal with room takes one byte without blocking, a pipe PIPE_BUF bytes.
            most = 1 if os.isatty(self._descriptor) else select.PIPE_BUF
        while written < len(data):
            if self._waits_too_long():
                return written, TimeoutError(errno.ETIMEDOUT, "the terminal was paused")
            try:
                written += os.write(self._descriptor, data[written : written + most])
            except BlockingIOError:
                wait_for_room(self._descriptor)
            except OSError as error:
                return written, error
        return written, None

    def _waits_too_long(self) -> bool:
        """Wait up to `patience_seconds` for room. Return True if there is none; the next call then does not wait."""
        if self._patience_seconds is None:
            return False
        self._is_paused = not wait_for_room(self._descriptor, 0.0 if self._is_paused else self._patience_seconds)
        return self._is_paused


class TextLines(io.TextIOWrapper):
    """A text stream over a raw stream that takes everything. It writes each whole line at once."""

    def __init__(self, file: io.RawIOBase) -> None:
        # The raw stream needs no buffer.
        super().__init__(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[arg-type]


def wait_for_room(descriptor: int, most_seconds: float | None = None) -> bool:
    """Wait until a descriptor accepts bytes or fails. Return False if `most_seconds` pass first."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(None if most_seconds is None else 1000 * most_seconds))
