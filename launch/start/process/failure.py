"""Find the rank whose failure ended a run, and describe it with the end of its log.

When one rank dies, torchrun ends the others, and its peers fail by themselves a moment later. The first cause is a rank that
torchrun did not end. Among several, it is the one whose end torchrun saw first; at equal times, the one whose log stopped first.
"""

import os
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from triaxis.engine.comm.stop import Stop
from triaxis.engine.errors import ExitCode, TriaxisError
from triaxis.engine.resilience.hang.watch import hang_report
from triaxis.launch.start.process.named_causes import named_causes

AFTER = {
    Stop.PREEMPTED: ExitCode.REQUEUE,
    Stop.INTERRUPTED: ExitCode.INTERRUPTED,
    Stop.NEXT_PHASE: ExitCode.NEXT_PHASE,
}
"""Exit codes for runs that all ranks have agreed to stop."""

OTHERS_END_SECONDS = 10
"""Time for ranks to end once another has failed, before SIGKILL. A rank that waits in NCCL does not react to SIGTERM."""

LAST_LINES = 20
LAST_BYTES = 64 * 1024
"""Bytes to read from the end of a log; a long run's log is large."""


class ExplainedError(Exception):
    """A failure that some rank has already printed. The process only needs to end with `exit_code`."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


def where(device_index: int | None, pid: int | None = None) -> str:
    """Describe where a rank on this node runs, such as `node1, pid 4711, GPU 3`.

    Args:
        device_index: index of the rank's GPU; None: no GPU.
        pid: the rank's process ID; None: this process.
    """
    gpu = "" if device_index is None else f", GPU {device_index}"
    return f"{socket.gethostname()}, pid {os.getpid() if pid is None else pid}{gpu}"


def code_of(error: BaseException) -> int:
    """Return a rank's exit code: the exception's own if it has one, INTERRUPTED for Ctrl-C, else BROKE."""
    if isinstance(error, TriaxisError | ExplainedError):
        return error.exit_code
    return ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.BROKE


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The end of one rank.

    Attributes:
        exit_code: the rank's exit code, negative for a signal.
        seen_seconds: time when torchrun saw the end, in whole seconds since the epoch.
        where: the rank's host, process and GPU, in words.
    """

    rank: int
    exit_code: int
    seen_seconds: int
    where: str = ""

    @property
    def how(self) -> str:
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        return f"signal {signal.Signals(-self.exit_code).name}"


def describe_hang(failures: Iterable[RankFailure], logs: Path, since_seconds: float) -> str:
    """Return the report on the hang that ended the last attempt.

    If rank 0 wrote the report and is in `failures`, it has already printed the report on this terminal. The result is then "".
    If there is no report, the result says that.

    Args:
        failures: ends of this node's ranks.
        logs: `runs/<name>/logs`.
        since_seconds: start of the run, in seconds since the epoch.
    """
    attempts = [path for path in logs.parent.glob("hangs/attempt_*") if path.stat().st_mtime >= since_seconds]
    report = hang_report(max(attempts)) if attempts else None
    if report is None:
        return "the run hung, and its ranks were stopped; they could not record which rank waits for which."
    is_shown = report["reporter"] == 0 and any(failure.rank == 0 for failure in failures)
    return "" if is_shown else str(report["text"])


def last_log(logs: Path, rank: int, since_seconds: float) -> Path | None:
    """Return the log of a rank's last attempt in `runs/<name>/logs`.

    None: the rank has written no log since `since_seconds`, the run's start in seconds since the epoch.
    """
    found = (path for path in logs.glob(f"attempt_*/rank_{rank:05d}.log") if path.is_file())
    written = [path for path in found if path.stat().st_mtime >= since_seconds]
    return max(written, key=lambda path: path.parent.name, default=None)


def first_cause(failures: Iterable[RankFailure], logs: Path, since_seconds: float) -> RankFailure:
    """Choose the failure that caused the others.

    Args:
        failures: every rank that did not end with 0; at least one.
        logs: `runs/<name>/logs`.
        since_seconds: start of the run, in seconds since the epoch.
    """

    def order(failure: RankFailure) -> tuple[bool, int, float, int]:
        log = last_log(logs, failure.rank, since_seconds)
        last_words_seconds = log.stat().st_mtime if log else 0.0  # no log: it died before the others began
        was_ended_by_torchrun = failure.exit_code == -signal.SIGTERM
        return was_ended_by_torchrun, failure.seen_seconds, last_words_seconds, failure.rank

    return min(failures, key=order)


def describe(failure: RankFailure, logs: Path, since_seconds: float, *, kernel_killed: bool = False) -> str:
    """Describe a rank's end by its exit code, its last log lines, and the causes that they name.

    The log lines are left out if rank 0 has printed them. `kernel_killed` is as in `named_causes`.
    """
    where = f" ({failure.where})" if failure.where else ""
    head = f"rank {failure.rank} ended with {failure.how}{where}, so the job was stopped."
    log = last_log(logs, failure.rank, since_seconds)
    if log is None:
        causes = [f"  cause: {cause}" for cause in named_causes("", failure.exit_code, kernel_killed=kernel_killed)]
        return "\n".join([f"{head} It had not opened its log in {logs} yet; its output is above.", *causes])
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        text = file.read().decode(errors="replace")
    causes = [f"  cause: {cause}" for cause in named_causes(text, failure.exit_code, kernel_killed=kernel_killed)]
    if failure.rank == 0 and failure.exit_code >= 0:
        return "\n".join([f"{head} Its output is above, and in {log}.", *causes])
    lines = text.splitlines()[-LAST_LINES:]
    if not lines:
        return "\n".join([f"{head} Its log, {log}, is empty.", *causes])
    return "\n".join([f"{head} The end of its log, {log}:", *(f"  | {line}" for line in lines), *causes])
