"""Rank 0's terminal: one that ends, is paused or is full never holds the rank, and the log is whole."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.telemetry.outlets.test_rank_log import PREAMBLE, execute
from tests.full_disk import room_for
from tests.log_lines import without_times
from triaxis.engine.telemetry.outlets.lossy_file import LossyFile, TextLines
from triaxis.engine.telemetry.outlets.terminal import Terminal

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[4]


def start(tmp_path: Path, body: str, stdout: int) -> tuple[subprocess.Popen[bytes], Path]:
    """Start `body` as rank 0 with its terminal on `stdout`; returns the process and its log."""
    log = tmp_path / "rank_00000.log"
    rank = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + body, str(log), "show"],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    return rank, log


def end(rank: subprocess.Popen[bytes]) -> list[str]:
    """Let the rank go on behind its `input()`; returns what it wrote to standard error at its end."""
    _, errors = rank.communicate(b"\n", timeout=60)
    assert rank.returncode == 0, errors.decode()
    return errors.decode().splitlines()


def test_a_reader_that_ends_costs_the_terminal_and_nothing_else(tmp_path: Path) -> None:
    body = """
with rank_log(path, show=show) as streams:
    print("first")
    input()
    for number in range(1000):
        print("line", number)
        print("for people", file=streams.terminal)
    log, terminal = streams.outputs
    while not terminal.is_gone:
        pass
    print("last")
print(terminal.error.strerror, log.error, file=sys.stderr)
"""
    reading, writing = os.pipe()
    rank, log = start(tmp_path, body, writing)
    os.close(writing)
    assert os.read(reading, 100) == b"first\n"
    os.close(reading)
    assert end(rank) == ["Broken pipe None"]
    lines = without_times(log.read_text()).splitlines()
    assert lines == ["first", *(f"line {number}" for number in range(1000)), "last"]


@pytest.mark.slow
def test_a_paused_terminal_holds_nobody_and_says_how_many_lines_it_missed(tmp_path: Path) -> None:
    body = """
errors = os.dup(2)
with rank_log(path, show=show) as streams:
    assert streams.terminal.isatty()
    assert os.get_terminal_size(streams.terminal.fileno()).columns == 60
    for number in range(40_000):
        print(f"{number:059}")
    print("trained")
    os.write(errors, b"x")
    input()
"""
    master, slave = pty.openpty()
    tty.setraw(slave)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    rank, log = start(tmp_path, body, slave)
    os.close(slave)
    assert rank.stderr is not None
    assert rank.stderr.read(1) == b"x", "the rank has printed everything while nobody reads its terminal"
    wait_until(lambda: b"trained" in log.read_bytes()[-100:])
    read = b""
    while b"missing here" not in read:
        read += os.read(master, 1 << 16)
    end(rank)
    with_rest = read + rest_of(master)
    lines = with_rest.decode().splitlines()
    (missing,) = [line for line in lines if "missing" in line]
    found = re.fullmatch(r"\[(\d+) lines are missing here: the terminal was paused; .*\]", missing)
    assert found is not None, missing
    shown = [line for line in lines if re.fullmatch(r"\d{59}", line)]
    assert shown == [f"{number:059}" for number in range(len(shown))]
    assert len(shown) + int(found[1]) == 40_001
    assert without_times(log.read_text()).count("\n") == 40_001


def rest_of(master: int) -> bytes:
    """Read a pseudo-terminal to its end, which is an error."""
    read = b""
    try:
        while more := os.read(master, 1 << 16):
            read += more
    except OSError:
        return read
    return read


def wait_until(true: Callable[[], object]) -> None:
    deadline_seconds = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline_seconds, "it did not happen within 30 seconds"
        time.sleep(0.01)


def test_a_terminal_without_room_costs_no_line_of_the_log(tmp_path: Path) -> None:
    body = """
with rank_log(path, show=show) as streams:
    for number in range(100):
        print("line", number)
    log, terminal = streams.outputs
    while not terminal.error:
        pass
print(terminal.error.strerror, terminal.is_gone, log.error, file=sys.stderr)
"""
    full = os.open("/dev/full", os.O_WRONLY)
    rank, log = start(tmp_path, body, full)
    os.close(full)
    assert end(rank) == ["No space left on device False None"]
    assert without_times(log.read_text()).splitlines() == [f"line {number}" for number in range(100)]


@pytest.mark.parametrize("show", [True, False])
def test_a_log_without_room_is_whole_when_there_is_room_again(show: bool, tmp_path: Path) -> None:
    body = """
import resource
def room(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
with rank_log(path, show=show) as streams:
    log = streams.outputs[0]
    print("before")
    room(15 + 2 * 24)
    print("a line that is torn")
    print("kept", file=sys.stderr)
    errors = [log.error]
    room(resource.RLIM_INFINITY)
    log.retry()
    errors.append(log.error)
    print("after", file=streams.log)
print(errors[0].strerror, errors[1], log.num_lost, file=sys.stderr)
"""
    done, log = execute(tmp_path, show, body)
    assert done.returncode == 0, done.stderr
    assert log.splitlines() == ["before", "a line that is torn", "kept", "after"]
    assert done.stdout.splitlines() == (["before", "a line that is torn", "kept"] if show else [])
    assert done.stderr.splitlines() == ["File too large None 0"]


def test_what_was_printed_reaches_the_terminal_of_a_rank_that_ends_at_once(tmp_path: Path) -> None:
    body = """
with rank_log(path, show=show):
    print("line " * 1000)
    sys.stdout.flush()
    os._exit(0)
"""
    done, log = execute(tmp_path, True, body)
    assert log == done.stdout == "line " * 1000 + "\n"


def read_until(descriptor: int, end: bytes) -> bytes:
    """Read up to these bytes, which may come one by one; at most for 20 seconds without any."""
    read = b""
    while not read.endswith(end):
        assert select.select([descriptor], [], [], 20.0)[0], f"{read!r} does not end with {end!r}"
        read += os.read(descriptor, 1 << 16)
    return read


@pytest.mark.parametrize("pauses", ["with Ctrl-S", "without a reader", "a pipe"])
def test_a_paused_terminal_holds_a_launcher_for_a_bounded_time(pauses: str) -> None:
    reading, writing = os.pipe() if pauses == "a pipe" else pty.openpty()
    if pauses != "a pipe":
        tty.setraw(writing)
    stream = TextLines(LossyFile(writing, patience_seconds=0.05))
    print("before", file=stream)
    assert read_until(reading, b"\n") == b"before\n"
    if pauses == "with Ctrl-S":
        termios.tcflow(writing, termios.TCOOFF)
    started_seconds = time.monotonic()
    for number in range(3000):
        print(f"{number:059}", file=stream)
    assert time.monotonic() - started_seconds < 20.0, "3000 lines have waited once, and not each of them"
    if pauses == "with Ctrl-S":
        termios.tcflow(writing, termios.TCOON)
    read = b""
    while select.select([reading], [], [], 0.2)[0]:
        read += os.read(reading, 1 << 16)
    print("after", file=stream)
    read += read_until(reading, b"after\n")
    *lines, missing, last = read.decode().splitlines()
    assert last == "after"
    found = re.fullmatch(r"\[(\d+) lines are missing here: the terminal was paused\]", missing)
    assert found is not None, missing
    whole = [line for line in lines if len(line) == 59]
    assert whole == [f"{number:059}" for number in range(len(whole))] and len(lines) - len(whole) <= 1
    assert len(whole) + int(found[1]) == 3000
    os.close(writing)
    os.close(reading)


def test_a_half_line_after_a_gap_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb", buffering=0) as file:
        lossy = LossyFile(file.fileno())
        lossy.write(b"one\n")
        with room_for(4):
            lossy.write(b"lost\nlost in the")
            lossy.write(b" middle")
        assert lossy.write(b" of a line\ntwo\n") == 15
        print("three", file=TextLines(lossy))
    assert path.read_text() == "one\n[2 lines are missing here: File too large]\ntwo\nthree\n"


def test_a_file_that_stays_full_loses_lines_beyond_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb", buffering=0) as file:
        lossy = LossyFile(file.fileno(), most_bytes=20)
        with room_for(0):
            lossy.write(b"stopped\n")
            assert lossy.error is not None and lossy.error.strerror == "File too large"
            lossy.write(b"kept\nkept\nlost\nlo")
            lossy.write(b"st\nlost\n")
        lossy.retry()
        assert (lossy.error, lossy.num_lost) == (None, 3)
        lossy.write(b"after\n")
    assert path.read_text() == "stopped\nkept\nkept\n[3 lines are missing here: File too large]\nafter\n"


def test_a_terminal_that_fails_is_gone_and_costs_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    terminal = Terminal(writing)
    assert not terminal.is_gone
    terminal.write(b"lost\n")
    wait_until(lambda: terminal.is_gone)
    terminal.write(b"lost\n")
    terminal.drain()
    terminal.finish()
    os.close(writing)
    assert terminal.error is not None and terminal.error.strerror == "Broken pipe"


def test_a_terminal_that_stays_paused_holds_the_end_of_a_rank_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("triaxis.engine.telemetry.outlets.terminal.END_SECONDS", 0.1)
    reading, writing = os.pipe()
    terminal = Terminal(writing)
    terminal.write(b"x" * 999 + b"\n")
    terminal.drain()
    started_seconds = time.monotonic()
    for _ in range(300):
        terminal.write(b"x" * 999 + b"\n")
        terminal.drain()
    terminal.finish()
    assert time.monotonic() - started_seconds < 10.0, "one drain has waited, and not each"
    os.close(writing)
    os.close(reading)
