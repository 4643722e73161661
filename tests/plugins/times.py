"""A pytest plugin that says where the time went: seconds per test file, and per folder, against the time of the whole tier.

`tests/run.sh` loads it (`-p times`). Set-up and tear-down count for the file that asked for them.
"""

from collections import defaultdict
from pathlib import PurePosixPath

import pytest

BUDGET_SECONDS = 20 * 60
"""The CI tier, all of it, on two cores."""

SHOWN_FILES = 15


class FileTimes:
    """Adds up the durations of all phases of all tests, by file."""

    def __init__(self) -> None:
        self.seconds: dict[PurePosixPath, float] = defaultdict(float)

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
        share = total / BUDGET_SECONDS
        terminalreporter.line(f"{total:8.1f}  in all: {share:.0%} of the CI tier's {BUDGET_SECONDS / 60:.0f} minutes")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FileTimes(), "triaxis-file-times")
