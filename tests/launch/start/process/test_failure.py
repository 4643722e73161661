"""Which rank is named when several have failed, and what is shown of its log."""

import json
import os
import signal
from pathlib import Path

import pytest

from triaxis.engine.errors import ExitCode
from triaxis.engine.resilience.hang.watch import REPORT
from triaxis.launch.start.process.failure import LAST_LINES, RankFailure, describe, describe_hang, first_cause, last_log

START_SECONDS = 1_000_000.0


def write_log(logs: Path, rank: int, seconds: float, attempt: int = 0, text: str = "hello\n") -> Path:
    path = logs / f"attempt_{attempt:02d}" / f"rank_{rank:05d}.log"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    os.utime(path, (START_SECONDS + seconds, START_SECONDS + seconds))
    return path


def failure(rank: int, exit_code: int, seconds: int = 20) -> RankFailure:
    return RankFailure(rank, exit_code, int(START_SECONDS) + seconds)


@pytest.mark.parametrize(
    ("failures", "culprit"),
    [
        # rank 2 was killed; rank 1 lost its connection a moment later; the others were ended by torchrun
        ([failure(0, -15), failure(1, 1), failure(2, -9), failure(3, -15)], 2),
        # rank 1 raised; rank 0 hung, did not hear SIGTERM, and was killed 15 seconds later
        ([failure(0, -9, 35), failure(1, 1), failure(2, -15), failure(3, -15)], 1),
        # someone from outside sent SIGTERM to a rank, and nothing else happened
        ([failure(3, -15)], 3),
    ],
)
def test_the_first_cause(failures, culprit, tmp_path):
    for rank, seconds in enumerate((18.0, 19.5, 19.0, 18.0)):
        write_log(tmp_path, rank, seconds)
    for order in (failures, failures[::-1]):
        assert first_cause(order, tmp_path, START_SECONDS).rank == culprit


def test_a_rank_without_a_log_died_before_the_others_began(tmp_path):
    write_log(tmp_path, 0, 5.0)
    assert first_cause([failure(0, 1), failure(1, 1)], tmp_path, START_SECONDS).rank == 1


def test_the_log_is_of_this_start(tmp_path):
    write_log(tmp_path, 3, -100.0, attempt=0)
    assert last_log(tmp_path, 3, START_SECONDS) is None
    assert "had not opened its log" in describe(failure(3, -9), tmp_path, START_SECONDS)
    log = write_log(tmp_path, 3, 5.0, attempt=1)
    assert last_log(tmp_path, 3, START_SECONDS) == log


def test_the_end_of_the_log_is_shown(tmp_path):
    log = write_log(tmp_path, 3, 5.0, text="".join(f"line {n}\n" for n in range(100)))
    text = describe(failure(3, -signal.SIGSEGV), tmp_path, START_SECONDS)
    assert "rank 3 ended with signal SIGSEGV" in text
    assert str(log) in text
    assert text.splitlines()[1:] == [f"  | line {n}" for n in range(100 - LAST_LINES, 100)]
    assert "rank 3 ended with exit code 2" in describe(failure(3, 2), tmp_path, START_SECONDS)


@pytest.mark.parametrize(
    ("reporter", "ranks_here", "is_said"),
    [
        (0, (0, 1), False),  # rank 0 has said it, on the terminal of this launcher
        (0, (2, 3), True),  # it has said it, on the other node's
        (1, (0, 1), True),  # only rank 0 is shown, and it was stopped
    ],
)
def test_every_launcher_says_why_the_run_hangs_once(reporter, ranks_here, is_said, tmp_path):
    report = tmp_path / "hangs" / "attempt_00" / REPORT
    report.parent.mkdir(parents=True)
    report.write_text(json.dumps({"reporter": reporter, "text": "rank 2 waits for rank 0"}))
    failures = [failure(rank, ExitCode.HUNG) for rank in ranks_here]
    said = describe_hang(failures, tmp_path / "logs", START_SECONDS)
    assert said == ("rank 2 waits for rank 0" if is_said else "")


def test_a_log_that_is_no_file_is_not_read(tmp_path):
    path = tmp_path / "attempt_00" / "rank_00003.log"
    path.parent.mkdir()
    os.mkfifo(path)
    assert last_log(tmp_path, 3, 0.0) is None
    assert "had not opened its log" in describe(failure(3, -signal.SIGSEGV), tmp_path, 0.0)
