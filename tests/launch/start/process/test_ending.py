"""A rank's process ends with its own code, its output flushed, whatever its threads still wait for."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest

from triaxis.engine.errors import CheckpointError, ConfigError, DivergenceError, ExitCode, TopologyError
from triaxis.launch.start.process.ending import Main, WayOut, exit_code
from triaxis.launch.start.process.failure import ExplainedError, code_of

STUCK_RANK = """
import sys, threading
from triaxis.engine.errors import DivergenceError, OutOfMemoryError
from triaxis.launch.start.process.ending import run_rank

def main(words):
    threading.Thread(target=threading.Event().wait).start()  # the interpreter's teardown would join it
    print("half a line", end="")
    {ending}

run_rank(main, sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("return 3", 3, ""),
        ("raise OutOfMemoryError('rank 3 is out of memory')", 2, "error: rank 3 is out of memory\n"),
        ("raise RuntimeError('a bug')", 1, "RuntimeError: a bug\n"),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_a_rank_ends_with_its_own_code_although_a_thread_never_ends(ending: str, code: int, words: str) -> None:
    command = [sys.executable, "-c", STUCK_RANK.format(ending=ending)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout) == (code, "half a line")
    assert ended.stderr.endswith(words) and ("Traceback" in ended.stderr) == (code == 1)


def test_output_that_nobody_reads_changes_no_exit_code() -> None:
    script = STUCK_RANK.format(ending="import time; time.sleep(0.2); return 3")
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=buffered) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(30) == 3


def test_each_error_has_the_code_that_its_class_says() -> None:
    errors = [ConfigError(["a"]), DivergenceError("b"), ValueError("c"), KeyboardInterrupt()]
    assert [code_of(error) for error in errors] == [2, 6, 1, 130]


def test_a_mistake_is_printed_once_and_a_failure_that_was_explained_not_at_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(error: BaseException) -> Main:
        def main(words: Sequence[str]) -> int:
            raise error

        return main

    for rank, printed in ((0, "error: a rank too many\n"), (1, "")):
        monkeypatch.setenv("RANK", str(rank))
        assert exit_code(raising(TopologyError("a rank too many")), []) == ExitCode.MISTAKE
        assert capsys.readouterr().err == printed
        assert exit_code(raising(ExplainedError(ExitCode.DIVERGED)), []) == ExitCode.DIVERGED
        assert capsys.readouterr().err == ""
        assert exit_code(raising(ValueError("a bug")), []) == ExitCode.BROKE
        assert capsys.readouterr().err.endswith("ValueError: a bug\n")


def ends_with(error: BaseException, closing_seconds: float, agreed: tuple[type[BaseException], ...] = ()) -> list[int]:
    """Exit codes with which a rank leaves whose closing takes up to `closing_seconds` after `error`."""
    left: list[int] = []
    gone = threading.Event()

    def leave(code: int) -> None:
        left.append(code)
        gone.set()

    with pytest.raises(type(error)), WayOut(0.1, leave) as way_out:
        try:
            with way_out.bounded(agreed):
                raise error
        finally:
            gone.wait(closing_seconds)
    gone.wait(0.2)
    return left


def test_a_failure_whose_closing_hangs_ends_the_process_with_its_code() -> None:
    assert ends_with(DivergenceError("not finite"), closing_seconds=30.0) == [6]


def test_what_is_closed_in_time_and_errors_of_all_ranks_have_no_limit() -> None:
    assert ends_with(DivergenceError("not finite"), closing_seconds=0.0) == []
    assert ends_with(CheckpointError("full disk"), closing_seconds=0.2, agreed=(CheckpointError,)) == []
