"""Rank logs: what print, the C library and a crash write ends in the log, and what rank 0 prints on the terminal too."""

import gc
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.log_lines import without_times
from triaxis.engine.telemetry.outlets.lossy_file import LogPath, LossyFile, Stamps

pytestmark = pytest.mark.distributed

PREAMBLE = """
import os, subprocess, sys
from pathlib import Path
from triaxis.engine.telemetry.outlets.rank_log import rank_log
path, show = Path(sys.argv[1]), sys.argv[2] == "show"
"""


def execute(tmp_path: Path, show: bool, body: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run `body` as a rank; returns the process and its log."""
    log = tmp_path / "logs" / "rank_00000.log"
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + body, str(log), "show" if show else "hide"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[4],
        check=False,
    )
    return done, without_times(log.read_text())


SPEAK = """
print("before")
with rank_log(path, show=show) as streams:
    print("printed")
    print("warned", file=sys.stderr)
    os.write(1, b"from C\\n")
    os.write(2, b"from C too\\n")
    subprocess.run(["echo", "from a child"], check=True)
    if streams.terminal is not None:
        print("for people", file=streams.terminal)
    streams.log.write("for the log\\n")
print("after")
"""


def test_a_rank_that_is_not_shown_writes_to_its_log_alone(tmp_path: Path) -> None:
    done, log = execute(tmp_path, False, SPEAK)
    assert log.splitlines() == ["printed", "warned", "from C", "from C too", "from a child", "for the log"]
    assert done.stdout.splitlines() == ["before", "after"]
    assert done.stderr == "" and done.returncode == 0


def test_rank_0_writes_to_both_and_what_is_for_people_stays_out_of_the_log(tmp_path: Path) -> None:
    done, log = execute(tmp_path, True, SPEAK)
    assert log.splitlines() == ["printed", "warned", "from C", "from C too", "from a child", "for the log"]
    assert done.stdout.splitlines() == ["before", "printed", "warned", "for people", "after"]


@pytest.mark.parametrize("show", [True, False])
def test_a_log_that_is_removed_or_moved_goes_on_when_its_folder_is_there_again(show: bool, tmp_path: Path) -> None:
    body = """
import time
os.chdir("/")
with rank_log(path, show=show):
    print("before", flush=True)
    while "before" not in path.read_text():
        time.sleep(0.01)
    path.parent.rename(path.parent.with_name("old"))
    time.sleep(1.1)
    print("between")
    time.sleep(0.1)
    path.parent.mkdir()
    print("after")
    os.write(2, b"from C\\n")
"""
    _, log = execute(tmp_path, show, body)
    assert log.splitlines() == ["[this log begins again: its folder was removed or moved]", "after", "from C"]
    assert without_times((tmp_path / "old" / "rank_00000.log").read_text()).splitlines() == ["before", "between"]


def test_a_log_of_another_run_that_has_the_path_is_left_alone(tmp_path: Path) -> None:
    path, seconds = tmp_path / "log", 0.0
    with path.open("ab", buffering=0) as file:
        lossy = LossyFile(file.fileno(), log=LogPath(str(path), (file.fileno(),), lambda: seconds))
        path.rename(tmp_path / "old")
        path.write_text("another run\n")
        seconds = 2.0
        lossy.write(b"one\n")
        path.unlink()
        lossy.write(b"two\n")
        seconds = 4.0
        lossy.write(b"three\n")
    assert (tmp_path / "old").read_text() == "one\ntwo\n"
    assert path.read_text() == "[this log begins again: its folder was removed or moved]\nthree\n"


def test_each_line_has_a_time_and_a_part_of_a_line_has_none_of_its_own() -> None:
    stamps = Stamps(lambda: 1_700_000_000.25)
    written = b"".join(stamps.put_on(part) for part in (b"one\ntw", b"o", b"\n", b"", b"\nthree\n"))
    assert [line[19:] for line in written.splitlines()] == [b".250 one", b".250 two", b".250 ", b".250 three"]
    assert written.startswith(b"2023-11-1")


def test_the_last_words_of_a_crash_are_kept(tmp_path: Path) -> None:
    body = """
import faulthandler, signal
with rank_log(path, show=show):
    faulthandler.enable()
    print("going down")
    os.kill(os.getpid(), signal.SIGSEGV)
"""
    for show in (False, True):
        done, log = execute(tmp_path / str(show), show, body)
        assert done.returncode == -signal.SIGSEGV
        assert "going down" in log and "Segmentation fault" in log


def test_a_signal_handler_writes_to_both_in_the_middle_of_a_print(tmp_path: Path) -> None:
    body = """
import signal, threading, time
with rank_log(path, show=show) as streams:
    signal.signal(signal.SIGUSR1, lambda *_: streams.write(b"from a handler\\n"))
    main, is_over = threading.main_thread().ident, threading.Event()
    def interrupt():
        while not is_over.wait(0.002):
            signal.pthread_kill(main, signal.SIGUSR1)
    thread = threading.Thread(target=interrupt)
    thread.start()
    for number in range(3000):
        print("line", number)
    is_over.set()
    thread.join()
"""
    done, log = execute(tmp_path, True, body)
    assert done.returncode == 0, done.stderr
    for said in (log.splitlines(), done.stdout.splitlines()):
        assert [line for line in said if line != "from a handler"] == [f"line {number}" for number in range(3000)]
        assert "from a handler" in said


def test_a_second_attempt_appends_and_a_child_that_stays_does_not_hold_the_rank(tmp_path: Path) -> None:
    body = """
with rank_log(path, show=show):
    print("once")
    child = subprocess.Popen(["sleep", "30"])
child.kill()
"""
    execute(tmp_path, True, 'with rank_log(path, show=show):\n    print("first")\n')
    done, log = execute(tmp_path, True, body)
    assert log.splitlines() == ["first", "once"]
    assert done.returncode == 0


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir() if path.exists()}


def test_the_streams_of_this_process_come_back(tmp_path: Path) -> None:
    from triaxis.engine.telemetry.outlets.rank_log import rank_log

    gc.collect()  # files of other tests that wait for the collector would be closed meanwhile
    streams, descriptors = (sys.stdout, sys.stderr), open_descriptors()
    with rank_log(tmp_path / "x.log", show=True):
        print("hello")
    assert (sys.stdout, sys.stderr) == streams
    assert open_descriptors() == descriptors
    log = (tmp_path / "x.log").read_text()
    assert log != without_times(log) == "hello\n"
