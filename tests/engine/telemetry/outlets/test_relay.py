"""The relay of rank 0: a terminal that ends, is paused or is full never holds the rank, and the log is whole."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.engine.telemetry.outlets.test_rank_log import PREAMBLE, execute
from tests.full_disk import room_for
from tests.log_lines import without_times
from triaxis.engine.telemetry.outlets.lossy_file import LogPath, LossyFile, text_over
from triaxis.engine.telemetry.outlets.relay import (
    DROPPED,
    MOST_BYTES,
    RESUMED,
    STOPPED,
    WHOLE_LINE_SECONDS,
    Lines,
    RelayQueue,
    relay,
)

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


CHANGES = """
print(*[(it.output, it.what, it.cause, it.num_lost) for it in changes], sep="\\n", file=sys.stderr)
"""


def test_a_reader_that_ends_costs_the_terminal_and_nothing_else(tmp_path: Path) -> None:
    body = """
with rank_log(path, show=show) as streams:
    print("first")
    input()
    changes = []
    for number in range(1000):
        print("line", number)
        print("for people", file=streams.terminal)
    while not changes:
        changes += streams.changes()
    print("last")
    changes += streams.changes()
"""
    reading, writing = os.pipe()
    rank, log = start(tmp_path, body + CHANGES, writing)
    os.close(writing)
    assert os.read(reading, 100) == b"first\n"
    os.close(reading)
    assert end(rank) == ["('terminal', 'dropped', 'Broken pipe', 0)"]
    dropped = "[the terminal can no longer be written (Broken pipe); the run goes on]"
    lines = without_times(log.read_text()).splitlines()
    assert lines.count(dropped) == 1
    lines.remove(dropped)
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


@pytest.mark.slow  # a terminal that never takes its lines has two seconds at the end
def test_a_terminal_without_room_costs_no_line_of_the_log(tmp_path: Path) -> None:
    body = """
with rank_log(path, show=show) as streams:
    for number in range(100):
        print("line", number)
    changes = []
    while not changes:
        changes += streams.changes()
"""
    full = os.open("/dev/full", os.O_WRONLY)
    rank, log = start(tmp_path, body + CHANGES, full)
    os.close(full)
    assert end(rank) == ["('terminal', 'stopped', 'No space left on device', 0)"]
    assert without_times(log.read_text()).splitlines() == [f"line {number}" for number in range(100)]


FULL = """
import psutil, resource
def changed(what):
    changes = []
    while what not in [it.what for it in changes]:
        changes += streams.changes()
    return changes
def room(pid, size):
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
with rank_log(path, show=show) as streams:
    relay = psutil.Process().children()[0].pid
    print("before")
    room(relay, 15)
    print("a line that is torn")
    changes = changed("stopped")
    print("kept")
    room(relay, resource.RLIM_INFINITY)
    changes += changed("resumed")
    print("after")
"""


def test_a_log_without_room_is_whole_when_there_is_room_again(tmp_path: Path) -> None:
    done, log = execute(tmp_path, True, FULL + CHANGES)
    assert done.returncode == 0, done.stderr
    assert log.splitlines() == ["before", "a line that is torn", "kept", "after"] == done.stdout.splitlines()
    assert done.stderr.splitlines() == [
        "('log', 'stopped', 'File too large', 0)",
        "('log', 'resumed', 'File too large', 0)",
    ]


def test_lines_of_two_pipes_never_mix(tmp_path: Path) -> None:
    """Reads of a pipe end inside lines of 100,000 bytes, and rows of the table come meanwhile."""
    body = """
with rank_log(path, show=show) as streams:
    for number in range(5):
        os.write(1, b"a line that has " + b"." * 50_000)
        print(f"row {number}", file=streams.log)
        print(f"row {number}", file=streams.terminal)
        os.write(1, b"." * 50_000 + b" its end\\n")
"""
    done, log = execute(tmp_path, True, body)
    assert done.returncode == 0, done.stderr
    lines = [*(f"row {number}" for number in range(5)), *5 * [f"a line that has {'.' * 100_000} its end"]]
    assert sorted(done.stdout.splitlines()) == sorted(lines) == sorted(log.splitlines())


def test_the_beginning_of_a_line_waits_for_its_end_for_a_bounded_time() -> None:
    seconds = 5.0
    lines = Lines(lambda: seconds)
    assert lines.take(b"one\ntw") == b"one\n" and lines.is_inside
    assert lines.take(b"o, three") == b"" == lines.late()
    assert lines.wait_milliseconds == 1000 * WHOLE_LINE_SECONDS
    assert lines.take(b", four\nfive") == b"two, three, four\n"
    seconds += WHOLE_LINE_SECONDS / 2
    assert lines.late() == b"" and lines.is_inside
    seconds += WHOLE_LINE_SECONDS / 2
    assert lines.late() == b"five" and not lines.is_inside
    assert lines.take(b" goes on\n") == b" goes on\n"
    assert lines.take(b"the last") == b""
    assert lines.take(b"") == b"the last" and not lines.is_inside


def test_a_rank_whose_relay_was_killed_goes_on_with_its_log(tmp_path: Path) -> None:
    body = """
import psutil
with rank_log(path, show=show) as streams:
    print("before")
    relay = psutil.Process().children()[0]
    for _ in range(3000):
        if path.read_text():
            break
        time.sleep(0.01)
    relay.kill()
    relay.wait()
    print("printed")
    os.write(2, b"from C\\n")
    print("for people", file=streams.terminal)
    print("for the log", file=streams.log)
    changes = [*streams.changes(), *streams.changes()]
"""
    done, log = execute(tmp_path, True, "import time" + body + CHANGES)
    assert done.returncode == 0, done.stderr
    assert log.splitlines() == ["before", "printed", "from C", "for the log"]
    assert done.stderr.splitlines() == ["('terminal', 'dropped', 'the relay has ended', 0)"]


def test_a_rank_that_is_not_shown_counts_the_lines_that_its_log_refuses(tmp_path: Path) -> None:
    body = """
import resource
with rank_log(path, show=show) as streams:
    print("before")
    resource.setrlimit(resource.RLIMIT_FSIZE, (15 + 2 * 24, resource.RLIM_INFINITY))
    print("a line that is torn")
    print("lost", file=sys.stderr)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print("after", file=streams.log)
"""
    done, log = execute(tmp_path, False, body)
    assert done.returncode == 0, done.stderr
    assert log.splitlines() == ["before", "a line t", "[2 lines are missing here: File too large]", "after"]


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
    stream = text_over(LossyFile(writing, patience_seconds=0.05))
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
        print("three", file=text_over(lossy))
    assert path.read_text() == "one\n[2 lines are missing here: File too large]\ntwo\nthree\n"


def test_an_outlet_that_stays_full_loses_lines_beyond_its_bound(tmp_path: Path) -> None:
    changes: list[tuple[str, str, int]] = []
    path = tmp_path / "log"
    with path.open("wb", buffering=0) as file:
        outlet = RelayQueue(file.fileno(), is_terminal=False, on_change=lambda *it: changes.append(it), most_bytes=12)
        with room_for(0):
            outlet.write(b"stopped\n")
            wait_until(lambda: changes)
            outlet.write(b"kept\nkept\nlost\nlo")
            outlet.write(b"st\nlost\n")
        wait_until(lambda: len(changes) == 2)
        outlet.write(b"after\n")
        outlet.finish(time.monotonic() + 10)
    assert path.read_text() == "stopped\nkept\nkept\n[3 lines are missing here: File too large]\nafter\n"
    assert changes == [(STOPPED, "File too large", 0), (RESUMED, "File too large", 3)]


def test_a_log_that_is_too_slow_says_so_and_does_not_name_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    reading, writing = os.pipe()
    room = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
    os.write(writing, bytes(room))
    log = LogPath(str(tmp_path / "log"), (writing,))
    outlet = RelayQueue(writing, is_terminal=False, on_change=lambda *_: None, most_bytes=50, log=log)
    for number in range(9):
        outlet.write(f"line {number}\n".encode())
    os.read(reading, room)
    outlet.finish(time.monotonic() + 10)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = without_times(file.read()).splitlines()
    kept = len(said) - 1
    lost = f"[{9 - kept} lines are missing here: they came faster than the file took them]"
    assert kept < 5 and said == [*(f"line {number}" for number in range(kept)), lost]


def test_a_log_that_waits_for_its_disk_keeps_a_burst_that_is_too_much_for_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    pipes = [os.pipe() for _ in range(5)]
    (both, prints), (for_terminal, to_terminal), (for_log, to_log), (reading, log), (_, changes) = pipes
    with Path(os.devnull).open("wb") as terminal:
        given = {"terminal": terminal.fileno(), "log": log, "changes": changes, "path": str(tmp_path / "log")}
        carries = threading.Thread(target=relay, args=(both, for_terminal, for_log), kwargs=given)
        carries.start()
        burst = b"x" * 999 + b"\n"
        for _ in range(2 * MOST_BYTES // len(burst)):
            os.write(prints, burst)
        os.write(prints, b"last\n")
        for writing in (prints, to_terminal, to_log):
            os.close(writing)
        read = read_until(reading, b"last\n")
        carries.join()
    for descriptor in (both, for_terminal, for_log, reading, log, *pipes[-1]):
        os.close(descriptor)
    assert without_times(read.decode()).encode() == burst * (2 * MOST_BYTES // len(burst)) + b"last\n"


def test_a_terminal_that_fails_is_dropped_once() -> None:
    changes: list[Sequence[object]] = []
    reading, writing = os.pipe()
    os.close(reading)
    outlet = RelayQueue(writing, is_terminal=True, on_change=lambda *it: changes.append(it), most_bytes=MOST_BYTES)
    outlet.write(b"lost\n")
    wait_until(lambda: changes)
    outlet.write(b"lost\n")
    outlet.finish(time.monotonic() + 10)
    os.close(writing)
    assert changes == [(DROPPED, "Broken pipe", 0)]
