"""Carries rank 0's output to the log and the terminal, in a separate process.

    pipe  both      print, warnings, C++, NCCL     -+->  Outlet  ->  rank_00000.log
    pipe  log       lines for the log alone        -'
    pipe  both      the same                       -+->  Outlet  ->  the terminal
    pipe  terminal  lines and bar for the terminal -'
    pipe  changes   failures and recoveries of the outlets      ->  the rank, which writes events

The relay always reads its pipes, so the rank never waits for a paused terminal or a full disk. Each outlet (the log, the terminal)
has a thread, which may block, and a bounded queue. O_NONBLOCK is never set, because it would affect other programs on the terminal.

    the outlet                        what the relay does
    blocks (Ctrl-S, a paused less)    queues bytes up to a bound, then loses lines; later a line states how many
    has no room (ENOSPC, ...)         queues and loses lines in the same way, and tries again every RETRY_SECONDS
    was removed (a log)               begins a new file once its folder exists again
    fails (EPIPE, EIO, ...)           drops a terminal for good; treats a log as if it had no room

The relay is a separate process, so that the last output survives when rank 0 crashes in C++. It ends once no process has its pipes
open for writing. `rank_log` starts it without site-packages, so it may import only standard library modules.
"""

import errno
import os
import select
import sys
import threading
import time
from collections.abc import Callable

from triaxis.engine.telemetry.outlets.lossy_file import Gap, LogPath, Stamps, wait_for_room

MOST_BYTES = 1 << 20
"""Bytes that the terminal's outlet queues while it cannot write; they hold some thousand lines."""

LOG_BYTES = 1 << 24
"""Bytes that the log's outlet queues.

The log must keep the lines that the terminal loses, and on a busy machine a rank may print faster than the outlet's thread writes.
"""

RETRY_SECONDS = 0.5
"""Time between two tries to write to a full disk."""

END_SECONDS = 2.0
"""Time for the outlets to empty their queues after the last writer has ended."""

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that pass once the file system has room again."""

DROPPED = "dropped"
STOPPED = "stopped"
RESUMED = "resumed"
"""Changes of an outlet. `DROPPED`: it is gone for good. `STOPPED`: a write has failed. `RESUMED`: the whole queue is written."""

PAUSED = "the terminal was paused; the log of the rank has them"
SLOW = "they came faster than the file took them"
"""Causes of lost lines when no write has failed: `PAUSED` on the terminal, `SLOW` in the log."""

WHOLE_LINE_SECONDS = 1.0
"""Time for which the beginning of a line waits for the line's end, so that lines from two pipes do not mix."""

_CHUNK_BYTES = 4096
"""Largest number of bytes per write. A blocked pipe accepts them in one piece, once it has that much room."""


class RelayQueue:
    """A bounded queue in front of a file or terminal, emptied by a thread.

    Args:
        descriptor: descriptor that only the thread writes to.
        is_terminal: whether the outlet is a terminal, which is dropped at any error except lack of room.
        on_change: function (change, cause, number of lost lines) for each `STOPPED`, `RESUMED` or `DROPPED`.
        most_bytes: queue bound in bytes.
        log: path of the log file, created anew if removed; None if the outlet is no log. A log's lines get time stamps.
    """

    def __init__(
        self,
        descriptor: int,
        *,
        is_terminal: bool,
        on_change: Callable[[str, str, int], None],
        most_bytes: int,
        log: LogPath | None = None,
    ) -> None:
        self._descriptor = descriptor
        self._log = log
        self._stamps = None if log is None else Stamps()
        self._slow = PAUSED if log is None else SLOW
        self._is_terminal = is_terminal
        self._on_change = on_change
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._queue = bytearray()
        self._gap = Gap()
        self._last = b""
        self._cause = ""
        self._num_lost = 0
        self._is_ending = False
        self._is_dropped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Queue `data` without waiting. Once the queue is full, lines are lost until it is empty.

        A dropped outlet ignores `data`.
        """
        with self._changed:
            data = data if self._stamps is None else self._stamps.put_on(data)
            if self._is_dropped:
                return
            if self._gap.num_lines:
                self._gap.lose(self._gap.rest(data))
                return
            data = self._gap.rest(data)
            room = self._most_bytes - len(self._queue)
            kept = data if len(data) <= room else data[: data.rfind(b"\n", 0, max(0, room)) + 1]
            self._queue += kept
            self._gap.lose(data[len(kept) :])
            self._changed.notify()

    def finish(self, deadline_seconds: float) -> None:
        """Wait until the queue is written, at most until `deadline_seconds` on the monotonic clock."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        self._thread.join(max(0.0, deadline_seconds - time.monotonic()))

    def _run(self) -> None:
        while chunk := self._next_chunk():
            self._put(chunk)
            self._last = chunk[-1:]

    def _next_chunk(self) -> bytes:
        """Wait for queued bytes or a report of lost lines. Return b"" once the outlet is dropped or finished."""
        with self._changed:
            while not self._is_dropped:
                if self._queue:
                    chunk = bytes(self._queue[:_CHUNK_BYTES])
                    del self._queue[:_CHUNK_BYTES]
                    return chunk
                if self._cause and not self._gap.num_lines:
                    self._on_change(RESUMED, self._cause, self._num_lost)
                    self._cause, self._num_lost = "", 0
                if self._gap.num_lines:
                    if self._cause:
                        self._num_lost += self._gap.num_lines
                    return self._gap.report(self._cause or self._slow, after=self._last)
                if self._is_ending:
                    return b""
                self._changed.wait()
            return b""

    def _put(self, chunk: bytes) -> None:
        """Write a chunk, and retry until all is written or the outlet is dropped."""
        while chunk and not self._is_dropped:
            if self._log is not None:
                self._log.look()
            try:
                chunk = chunk[os.write(self._descriptor, chunk) :]
            except BlockingIOError:
                wait_for_room(self._descriptor)
            except OSError as error:
                cause = error.strerror or str(error)
                if self._is_terminal and error.errno not in NO_ROOM:
                    with self._changed:
                        self._is_dropped = True
                        self._queue.clear()
                    self._on_change(DROPPED, cause, 0)
                    return
                if not self._cause:
                    self._cause = cause
                    self._on_change(STOPPED, cause, 0)
                time.sleep(RETRY_SECONDS)


class Lines:
    """Passes on one pipe's bytes as whole lines, so that lines from two pipes do not mix.

    If no byte comes for `WHOLE_LINE_SECONDS`, an unfinished line is passed on.

    Args:
        clock: function that returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = b""
        self._since_seconds = 0.0

    def take(self, data: bytes) -> bytes:
        """Add `data` and return the whole lines. If the pipe has ended (no data), return everything."""
        whole, newline, begun = data.rpartition(b"\n")
        if newline or not data:
            given, self._begun = self._begun + whole + newline, begun
        else:
            given, self._begun = b"", self._begun + begun
        self._since_seconds = self._clock()
        return given

    def late(self) -> bytes:
        """Remove and return an unfinished line if no byte has come for `WHOLE_LINE_SECONDS`, else return b""."""
        if not self._begun or self._clock() - self._since_seconds < WHOLE_LINE_SECONDS:
            return b""
        given, self._begun = self._begun, b""
        return given

    @property
    def is_inside(self) -> bool:
        """Whether the beginning of a line is held back until its end arrives."""
        return bool(self._begun)

    @property
    def wait_milliseconds(self) -> float:
        """Milliseconds until `late` stops waiting for a line's end and returns the line's beginning."""
        return max(0.0, 1000 * (self._since_seconds + WHOLE_LINE_SECONDS - self._clock()))


def relay(both: int, for_terminal: int, for_log: int, *, terminal: int, log: int, changes: int, path: str) -> None:
    """Carry bytes from the pipes to the log and the terminal, until all pipes end.

    Args:
        both: pipe to the log and the terminal.
        for_terminal: pipe to the terminal alone.
        for_log: pipe to the log alone.
        terminal: descriptor of the terminal, or of the pipe or file in its place.
        log: the log file's descriptor, open for appending.
        path: absolute path of the log file.
        changes: pipe to the rank, one line `outlet TAB change TAB lost lines TAB cause` per change.
    """

    def change(outlet: str, what: str, cause: str, num_lost: int) -> None:
        try:
            os.write(changes, f"{outlet}\t{what}\t{num_lost}\t{cause}\n".encode())
        except OSError:
            return  # the rank has ended

    def terminal_changed(what: str, cause: str, num_lost: int) -> None:
        if what == DROPPED:
            in_log.write(f"[the terminal can no longer be written ({cause}); the run goes on]\n".encode())
        change("terminal", what, cause, num_lost)

    in_log = RelayQueue(
        log,
        is_terminal=False,
        on_change=lambda *it: change("log", *it),
        most_bytes=LOG_BYTES,
        log=LogPath(path, (log,)),
    )
    on_terminal = RelayQueue(terminal, is_terminal=True, on_change=terminal_changed, most_bytes=MOST_BYTES)
    outlets = {both: (in_log, on_terminal), for_terminal: (on_terminal,), for_log: (in_log,)}
    # Output for a live terminal alone is a progress bar, which has no lines.
    lines = {pipe: Lines() for pipe in outlets if pipe != for_terminal or not os.isatty(terminal)}
    poll = select.poll()
    for pipe in outlets:
        poll.register(pipe, select.POLLIN)
    num_open = len(outlets)
    while num_open:
        for pipe, _ in poll.poll(
            min((each.wait_milliseconds for each in lines.values() if each.is_inside), default=None)
        ):
            data = os.read(pipe, 1 << 16)
            given = lines[pipe].take(data) if pipe in lines else data
            for outlet in outlets[pipe]:
                outlet.write(given)
            if not data:
                poll.unregister(pipe)
                num_open -= 1
        for pipe, begun in lines.items():
            late = begun.late()
            for outlet in outlets[pipe]:
                outlet.write(late)
    deadline_seconds = time.monotonic() + END_SECONDS
    on_terminal.finish(deadline_seconds)
    in_log.finish(deadline_seconds)


def main() -> None:
    """Run the relay on the command line's descriptors, then exit without waiting for threads."""
    both, for_terminal, for_log, terminal, log, changes = map(int, sys.argv[1:7])
    os.set_blocking(changes, False)  # a hanging rank does not read it
    relay(both, for_terminal, for_log, terminal=terminal, log=log, changes=changes, path=sys.argv[7])
    os._exit(0)
