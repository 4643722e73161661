"""A pytest plugin that reports seconds per test file and per folder, and the time of the whole tier.

`tests/run.sh` loads it (`-p times`). Set-up and tear-down count for the file that asked for them. Files run side by side, so the
seconds of all of them are more than the seconds on the clock.

Its last line has the user and system seconds of every process that the tests started. Pytest runs in a child for that. Its parent
adopts each process that outlives its own (a fork server, a rank without its launcher), and waits for it as init would.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections import defaultdict
from pathlib import PurePosixPath
from types import FrameType

import pytest

BUDGET_SECONDS = 11 * 60
"""The CI tier, all of it, on two cores, on the clock."""

CAP_SECONDS = 1007
"""User and system seconds of all processes of the CI tier: 85 % of the 1,185 of f55d909, before it was cut."""

SHOWN_FILES = 15

PR_SET_CHILD_SUBREAPER = 36
"""Of <sys/prctl.h>: orphans below this process become its children."""

LEFT_SECONDS = 20
"""How long processes may outlive pytest and still be counted."""


class FileTimes:
    """Adds up the durations of all phases of all tests, by file."""

    def __init__(self) -> None:
        self.seconds: dict[PurePosixPath, float] = defaultdict(float)
        self.start_seconds = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[PurePosixPath(report.nodeid.split("::", 1)[0])] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.seconds:
            return
        by_folder: dict[PurePosixPath, float] = defaultdict(float)
        for file, seconds in self.seconds.items():
            by_folder[file.parent] += seconds
        slowest = sorted(self.seconds.items(), key=lambda item: -item[1])[:SHOWN_FILES]
        terminalreporter.section("seconds per file")
        for file, seconds in slowest:
            terminalreporter.line(f"{seconds:8.1f}  {file}")
        if len(self.seconds) > len(slowest):
            terminalreporter.line(f"          and {len(self.seconds) - len(slowest)} faster files")
        terminalreporter.section("seconds per folder")
        for folder, seconds in sorted(by_folder.items(), key=lambda item: -item[1]):
            terminalreporter.line(f"{seconds:8.1f}  {folder}")
        total = sum(self.seconds.values())
        on_the_clock = time.monotonic() - self.start_seconds
        share = f"{on_the_clock / BUDGET_SECONDS:.0%} of the CI tier's {BUDGET_SECONDS / 60:.0f} minutes"
        terminalreporter.line(f"{total:8.1f}  in all; {on_the_clock:.1f} on the clock, {share}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FileTimes(), "triaxis-file-times")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    if not is_worker and sys.platform == "linux":
        _count_process_tree()


def _count_process_tree() -> None:
    """Go on in a child; its parent waits for all processes below, prints their seconds, and ends with the child's exit code."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the child as well
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: os.kill(child, number))
    signal.signal(signal.SIGALRM, _stop_waiting)
    exit_code, num_orphans = 1, 0
    with contextlib.suppress(ChildProcessError, TimeoutError):  # none is left, or some stay
        while True:
            pid, status = os.wait()
            if pid == child:
                exit_code = os.waitstatus_to_exitcode(status)
                signal.alarm(LEFT_SECONDS)
            else:
                num_orphans += 1
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = f"{used.ru_utime:.1f} s user + {used.ru_stime:.1f} s system"
    share = f"{(used.ru_utime + used.ru_stime) / CAP_SECONDS:.0%} of the CI tier's cap of {CAP_SECONDS:,} s"
    print(f"{seconds} in all processes of the tests ({num_orphans} orphans), {share}", flush=True)
    os._exit(exit_code if exit_code >= 0 else 128 - exit_code)


def _stop_waiting(number: int, frame: FrameType | None) -> None:
    raise TimeoutError
