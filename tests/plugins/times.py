"""A pytest plugin that reports seconds per test file and per folder, and the time of the whole tier.

`tests/run.sh` loads it (`-p times`). Set-up and tear-down count for the file that asked for them. Files run side by side, so the
seconds of all of them are more than the seconds on the clock.
"""

import time
from collections import defaultdict
from pathlib import PurePosixPath

import pytest

BUDGET_SECONDS = 11 * 60
"""The CI tier, all of it, on two cores, on the clock."""

SHOWN_FILES = 15


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
