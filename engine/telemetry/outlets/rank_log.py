"""Redirects each rank's output to a log file, and rank 0's also to the terminal.

    rank 3    print, warnings, C++ and NCCL (file descriptors 1 and 2)  ->  rank_00003.log
    rank 0    the same                                                  ->  relay  ->  rank_00000.log and the terminal
              the progress bar                                          ->  relay  ->  the terminal alone

Each log line begins with its time. On ranks other than 0, C++ output goes straight to the file, so that a crash loses nothing. Such
lines have the library's own time stamp, or none.

A rank's writes never fail and never wait for a terminal. On rank 0, the relay process (`triaxis.engine.telemetry.outlets.relay`)
queues what the terminal or a full disk refuses, and loses lines beyond a bound. Other ranks lose and count the lines that their log
refuses. If the relay ends, rank 0 goes on with its log alone.
"""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from triaxis.engine.program import IMPORT_ROOT
from triaxis.engine.storage.redaction import blotted
from triaxis.engine.telemetry.outlets.lossy_file import LogPath, LossyFile, Stamps, text_over
from triaxis.engine.telemetry.outlets.relay import DROPPED, END_SECONDS

_RELAY_ENDS_SECONDS = END_SECONDS + 0.5
"""Limit on waiting for the relay, which does not end while a child of this rank holds a pipe. The rank must end all the same."""

_RELAY = f"import sys; sys.path.append({str(IMPORT_ROOT)!r}); from triaxis.engine.telemetry.outlets.relay import main; main()"

_FOR_THE_RANK = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP})
"""Signals that SLURM or a terminal sends to every process in a job. The relay ignores them, because it must outlive its rank."""


@dataclass(frozen=True, slots=True)
class OutputChange:
    """A change in the state of one of the run's outputs.

    Attributes:
        output: `terminal`, `log`, or a file name.
        what: `DROPPED`, `STOPPED` or `RESUMED`, from `triaxis.engine.telemetry.outlets.relay`.
        cause: reason, such as the system's error text; may be "" for `RESUMED`.
        num_lost: number of lost lines or rows, counted only for `RESUMED`.
    """

    output: str
    what: str
    cause: str
    num_lost: int = 0


@dataclass(frozen=True, slots=True)
class RankStreams:
    """A rank's streams while `rank_log` is active. No write to them raises an OSError.

    Attributes:
        log: log file, written line by line.
        terminal: stream to the previous standard output; None on ranks that are not shown.
        changes: function that returns failures and recoveries of the terminal and the log since its last call.
    """

    log: TextIO
    terminal: TextIO | None
    changes: Callable[[], Sequence[OutputChange]] = tuple


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
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    saved = os.dup(1), os.dup(2)
    absolute = str(path.absolute())  # the rank may change its working directory
    relay = _Relay(log, saved[0], absolute) if show else None
    try:
        target = log if relay is None else relay.both
        os.dup2(target, 1)
        os.dup2(target, 2)
        if relay is None:
            said = blotted(text_over(LossyFile(1, log=LogPath(absolute, (1, 2)), stamps=Stamps())))
            streams = RankStreams(said, None)
        else:
            os.close(relay.both)
            said = blotted(text_over(LossyFile(1, replace=relay.replace)))
            terminal = blotted(text_over(LossyFile(relay.for_terminal, stands_for=saved[0], replace=relay.replace)))
            log_lines = blotted(text_over(LossyFile(relay.for_log, replace=relay.replace)))
            streams = RankStreams(log_lines, terminal, relay.changes)
        sys.stdout = sys.stderr = said
        yield streams
    finally:
        _flush((sys.stdout, sys.stderr))
        sys.stdout, sys.stderr = before
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        if relay is not None:
            relay.close()
        for descriptor in (*saved, log):
            os.close(descriptor)


def _flush(streams: Sequence[TextIO]) -> None:
    for stream in streams:
        with suppress(OSError, ValueError):
            stream.flush()


class _Relay:
    """The relay process and this rank's pipe ends.

    Args:
        log: the log file's descriptor.
        terminal: descriptor of the previous standard output.
        path: absolute path of the log file.

    Attributes:
        both: pipe to the log and the terminal; the caller closes it.
        for_terminal: pipe to the terminal alone.
        for_log: pipe to the log alone.
    """

    def __init__(self, log: int, terminal: int, path: str) -> None:
        self._log = log
        self._is_replaced = False
        self._end_is_told = False
        self._unread = b""
        pipes = [os.pipe() for _ in range(3)]
        self._changes, told = os.pipe()
        os.set_blocking(self._changes, False)
        (self.both, self.for_terminal, self.for_log) = (end for _, end in pipes)
        given = (*(end for end, _ in pipes), terminal, log, told)
        # The child inherits the blocked signals, so it ignores them from its first instruction on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_RANK)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _RELAY, *map(str, given), path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=given,
                env={name: value for name, value in os.environ.items() if name != "RANK"},  # the relay is no rank
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for descriptor in (*(end for end, _ in pipes), told):
            os.close(descriptor)

    def replace(self, error: OSError) -> bool:
        """Redirect output to the log if `error` shows that the relay process has ended. Return True if redirected now.

        From then on, output meant only for the terminal, such as the progress bar, is discarded.
        """
        if error.errno != errno.EPIPE or self._is_replaced:
            return False
        self._is_replaced = True
        for descriptor in (1, 2, self.for_log):
            os.dup2(self._log, descriptor)
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), self.for_terminal)
        return True

    def changes(self) -> Sequence[OutputChange]:
        """Return failures and recoveries of the terminal and the log since the last call.

        If the relay process has ended, the terminal is reported once as `DROPPED`.
        """
        with suppress(BlockingIOError):
            while more := os.read(self._changes, 1 << 16):
                self._unread += more
        *lines, self._unread = self._unread.split(b"\n")
        found = []
        for line in lines:
            output, what, num_lost, cause = line.decode().split("\t", 3)
            found.append(OutputChange(output, what, cause, int(num_lost)))
        if self._is_replaced and not self._end_is_told:
            self._end_is_told = True
            found.append(OutputChange("terminal", DROPPED, "the relay has ended"))
        return found

    def close(self) -> None:
        """Close this rank's side of the pipes and wait for the relay process to end.

        If the process has not ended after `_RELAY_ENDS_SECONDS`, it is killed.
        """
        for descriptor in (self.for_terminal, self.for_log, self._changes):
            os.close(descriptor)
        try:
            self._process.wait(_RELAY_ENDS_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
