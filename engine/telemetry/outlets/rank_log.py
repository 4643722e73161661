"""Redirects each rank's output to a log file, and rank 0's also to the terminal.

    rank 3    print, warnings                          ->  rank_00003.log
    rank 0    print, warnings                          ->  rank_00000.log and the terminal
              the progress bar                         ->  the terminal alone
    all       C++, NCCL, torch's loggers, child        ->  the rank's log
              processes (file descriptors 1 and 2)

In the log, each line of a print begins with its time. C++ output goes straight to the file, so that a crash loses nothing. Such
lines have the library's own time stamp, or none.

A rank's writes never fail and never wait for a terminal (`triaxis.engine.telemetry.outlets.terminal`). What a full disk refuses
waits in memory up to `LOG_BYTES`; lines beyond that are lost and counted.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from triaxis.engine.storage.redaction import blotted
from triaxis.engine.telemetry.outlets.lossy_file import LogPath, LossyFile, Stamps, TextLines
from triaxis.engine.telemetry.outlets.terminal import Terminal

LOG_BYTES = 1 << 24
"""Bytes that wait while the log's disk has no room."""


@dataclass(frozen=True, slots=True)
class RankStreams:
    """A rank's streams while `rank_log` is active. No write to them raises an OSError.

    Attributes:
        log: log file, written line by line.
        terminal: stream to the previous standard output; None on ranks that are not shown.
        outputs: the log and the terminal behind these streams, which say whether their writes fail.
    """

    log: TextIO
    terminal: TextIO | None
    outputs: Sequence[LossyFile | Terminal] = ()

    def write(self, line: bytes) -> None:
        """Write a line to all outputs, also in the middle of another print, as a signal handler does."""
        for output in self.outputs:
            output.write(line)


@contextmanager
def rank_log(path: Path, *, show: bool) -> Iterator[RankStreams]:
    """Append this process's standard output and error to `path`.

    If `show`, both also go to the previous standard output. Exceptions pass through unprinted, so print them inside the block.

    Raises:
        OSError: the log cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    before = sys.stdout, sys.stderr
    _flush(before)
    opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    saved = os.dup(1), os.dup(2)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.close(opened)
    # The rank may change its working directory.
    log = LossyFile(1, name="log", most_bytes=LOG_BYTES, log=LogPath(str(path.absolute()), (1, 2)), stamps=Stamps())
    terminal = Terminal(saved[0]) if show else None
    lines = blotted(TextLines(log))
    if terminal is None:
        said, streams = lines, RankStreams(lines, None, [log])
    else:
        said = blotted(_Shown(log, terminal))
        streams = RankStreams(lines, blotted(TextLines(terminal)), [log, terminal])
    sys.stdout = sys.stderr = said
    try:
        yield streams
    finally:
        _flush((sys.stdout, sys.stderr))
        log.retry()
        sys.stdout, sys.stderr = before
        for number, descriptor in enumerate(saved, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        if terminal is not None:
            terminal.finish()


def _flush(streams: Sequence[TextIO]) -> None:
    for stream in streams:
        with suppress(OSError, ValueError):
            stream.flush()


class _Shown(TextLines):
    """A text stream to rank 0's log whose lines also go to the terminal."""

    def __init__(self, log: LossyFile, terminal: Terminal) -> None:
        super().__init__(log)
        self._terminal, self._on_terminal = terminal, TextLines(terminal)

    def write(self, text: str) -> int:
        self._on_terminal.write(text)
        return super().write(text)

    def flush(self) -> None:
        """Wait a bounded time for the terminal too, because the process may end after this."""
        super().flush()
        self._terminal.drain()
