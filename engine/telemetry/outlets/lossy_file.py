"""Writes to a file or pipe that may refuse lines, which are counted without an error.

    step 7 ...
    step 8 .                                              no room for the rest of this line
    [3 lines are missing here: No space left on device]
    step 11 ...                                           there is room again

This module imports little, because `triaxis.engine.telemetry.outlets.relay` loads it when it starts.
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


class LossyFile(io.RawIOBase):
    """A binary stream over a descriptor, whose writes never fail. The stream does not own the descriptor.

    Args:
        descriptor: descriptor to write to.
        stands_for: descriptor for `fileno` and `isatty`; None means `descriptor`.
        replace: function (error of a failed write) -> whether `descriptor` now refers to another file. If True, the write is
            repeated, and lines get stamps from then on. None: the lines are lost.
        log: path to check before each write, because the log may be removed during the run; None if there is no log.
        stamps: time stamps for the lines; None writes lines unchanged.
        patience_seconds: time for which a write waits for a paused terminal or pipe. After that, lines are lost without waiting
            until there is room again. None means no limit.
    """

    def __init__(
        self,
        descriptor: int,
        *,
        stands_for: int | None = None,
        replace: Callable[[OSError], bool] | None = None,
        log: LogPath | None = None,
        stamps: Stamps | None = None,
        patience_seconds: float | None = None,
    ) -> None:
        self._stamps = stamps
        self._descriptor = descriptor
        self._patience_seconds = patience_seconds
        self._is_paused = False
        self._stands_for = descriptor if stands_for is None else stands_for
        self._replace = replace
        self._log = log
        # A signal handler may print in the middle of another print on the same thread.
        self._lock = threading.RLock()
        self._gap = Gap()
        self._cause = ""
        self._last = b""

    def fileno(self) -> int:
        return self._stands_for

    def isatty(self) -> bool:
        return os.isatty(self._stands_for)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write `data`, and count the refused lines. Return the number of bytes in `data`."""
        given = bytes(data)
        with self._lock:
            if self._log is not None:
                self._log.look()
            self._write(given if self._stamps is None else self._stamps.put_on(given))
        return len(given)

    def _write(self, given: bytes) -> None:
        data = self._gap.rest(given)
        if not data:
            return
        num_lost = self._gap.num_lines
        report = self._gap.report(self._cause, after=self._last) if num_lost else b""
        whole = report + data
        written, error = self._put(whole)
        if error is not None:
            self._cause = error.strerror or str(error)
            self._gap.lose(data[max(0, written - len(report)) :])
            if written < len(report):
                self._gap.num_lines += num_lost
        if written:
            self._last = whole[written - 1 : written]

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
                if self._replace is None or not self._replace(error):
                    return written, error
                self._stamps = Stamps()
        return written, None

    def _waits_too_long(self) -> bool:
        """Wait up to `patience_seconds` for room. Return True if there is none; the next call then does not wait."""
        if self._patience_seconds is None:
            return False
        self._is_paused = not wait_for_room(self._descriptor, 0.0 if self._is_paused else self._patience_seconds)
        return self._is_paused


def text_over(file: LossyFile) -> io.TextIOWrapper:
    """Wrap `file` in a text stream that writes each whole line at once."""
    return io.TextIOWrapper(
        file,  # type: ignore[arg-type]  # a raw stream that takes everything needs no buffer
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def wait_for_room(descriptor: int, most_seconds: float | None = None) -> bool:
    """Wait until a descriptor accepts bytes or fails. Return False if `most_seconds` pass first."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(None if most_seconds is None else 1000 * most_seconds))
