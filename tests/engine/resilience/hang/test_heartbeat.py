"""What a heartbeat says to another process, that it costs microseconds, and when a watch takes it for a hang."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lacking import give_up
from triaxis.engine.comm import runtime
from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.ledger import NO_PEER, Event, Ledger
from triaxis.engine.errors import ExitCode, NoRoomError, TriaxisError
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Action
from triaxis.engine.pipeline.lowering import Post
from triaxis.engine.resilience.hang.heartbeat import SIZE, Heartbeat, file_of, folders_of, read_beat
from triaxis.engine.resilience.hang.report import RunLayout
from triaxis.engine.resilience.hang.watch import (
    REPORT,
    HangLimits,
    HangWatch,
    StillLimit,
    hang_report,
    may_hang,
    read_status,
)
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.storage.state_files import MOST_BYTES

CALL = Event("post", 3, "recv", "pp_forward", "activations", None, 8, 2, peer=1)
SCHEDULE = schedules.build("1f1b", 1, 1, 1)
ALONE = RunLayout(RankGrid(ParallelSizes()), {"world": [(0,)]}, SCHEDULE, SCHEDULE)


@pytest.fixture
def heartbeat(tmp_path: Path) -> Heartbeat:
    return Heartbeat([tmp_path / "beats"], rank=0, attempt=2)


def test_another_process_reads_what_the_rank_does(heartbeat: Heartbeat) -> None:
    heartbeat.begin(411)
    heartbeat.enter(StepPart.DATA)
    heartbeat.enter(StepPart.FORWARD_BACKWARD)
    heartbeat.instruction(Action.parse("0F0"))
    heartbeat.instruction(Post("forward", ()))
    assert heartbeat.read().position == 0, "a post is no action of the schedule"
    heartbeat.instruction(Action.parse("0F1"))
    ledger = Ledger([heartbeat])
    heartbeat.wait_begins(CALL)
    beat = read_beat(heartbeat.path)
    assert beat is not None and beat == heartbeat.read()
    assert (beat.rank, beat.attempt, beat.step, beat.part, beat.position) == (0, 2, 412, "forward_backward", 2)
    assert beat.begun == 1
    assert (beat.op, beat.axis, beat.purpose, beat.peer) == ("recv", "pp_forward", "activations", 1)
    ledger.wait_ends(CALL)
    heartbeat.instruction(None)
    after = heartbeat.read()
    assert (after.op, after.peer, after.position) == ("", NO_PEER, 0) and after.beats > beat.beats
    heartbeat.close()
    assert read_beat(heartbeat.path) is None


class Instant:
    """A handle whose call is over."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


def test_a_ledger_has_several_observers(heartbeat: Heartbeat) -> None:
    told: list[object] = []

    class Other:
        def under_way(self, posted: object, handles: object) -> None:
            told.append(("under way", posted))

        def wait_begins(self, posted: object) -> None:
            told.append((posted, heartbeat.read().op))

        def wait_ends(self) -> None:
            told.append(heartbeat.read().op)

        def read_begins(self, mark: Event) -> None:
            told.append(("reads", mark.purpose, heartbeat.read().op))

        def read_ends(self) -> None:
            told.append("has read")

    ledger = Ledger([heartbeat, Other()])
    Pending(torch.zeros(1), [Instant()], written=(ledger, CALL)).wait()
    assert told == [("under way", CALL), (CALL, "recv"), ""], "each call and wait, in the order of the observers"
    told.clear()
    with ledger.host_read("counts"):
        told.append("numbers")
    assert told == [("reads", "counts", ""), "numbers", "has read"]


def test_a_file_of_somebody_else_is_none_of_ours(tmp_path: Path) -> None:
    for content in (b"", b"\0" * SIZE, b"x" * 17):
        (tmp_path / "file").write_bytes(content)
        assert read_beat(tmp_path / "file") is None
    (tmp_path / "file").unlink()
    os.mkfifo(tmp_path / "file")
    assert read_beat(tmp_path / "file") is None
    assert folders_of(tmp_path) == folders_of(tmp_path / ".." / tmp_path.name)
    assert not set(folders_of(tmp_path)) & set(folders_of(tmp_path / "other"))


def test_heartbeats_are_not_kept_where_others_may_write(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(elsewhere)
    for folder in (open_to_all, link):
        with pytest.raises(TriaxisError, match=f"{folder} is a link, or another user"):
            Heartbeat([folder], rank=0, attempt=0)
    assert not list(elsewhere.iterdir())


FILLED = """
import json, os, sys
from pathlib import Path
from triaxis.engine.resilience.hang.heartbeat import Heartbeat, folders_of
from triaxis.engine.run.step_parts import StepPart
full = Path("/dev/shm")
(full / "page").write_bytes(bytes(4096))
folders = folders_of(Path(sys.argv[1]))
beat = Heartbeat(folders, rank=3, attempt=1)
beat.enter(StepPart.FORWARD_BACKWARD)
seen = Heartbeat(folders, rank=4, attempt=1).of_rank(3, 1)
print(json.dumps([[str(folder) for folder in folders], str(beat.path), beat.passed_over, seen.part, os.listdir(full)]))
"""
"""A rank where another program has filled /dev/shm, and its neighbour."""


def in_small_shared_memory(program: str, *arguments: str, temporary: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a mount namespace of its own, whose /dev/shm has room for one page."""
    if shutil.which("unshare") is None:
        give_up("the command `unshare` is missing (apt-get install util-linux)")
    become_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    enter = ["unshare", "--mount", *become_root, "sh", "-c"]
    mounts = "mount -t tmpfs -o size=4k small /dev/shm"
    if subprocess.run([*enter, mounts], capture_output=True, check=False).returncode:
        give_up(
            "a mount namespace cannot be made: it takes root, or user namespaces (sysctl kernel.unprivileged_userns_clone=1)"
        )
    command = [*enter, f'{mounts} && exec "$@"', "sh", sys.executable, "-c", program, *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "TMPDIR": str(temporary)},
    )


def test_where_shared_memory_is_full_the_heartbeat_is_a_temporary_file(tmp_path: Path) -> None:
    ran = in_small_shared_memory(FILLED, str(tmp_path / "run"), temporary=tmp_path)
    assert ran.returncode == 0, f"signal {-ran.returncode} (SIGBUS is {signal.SIGBUS}): {ran.stderr}"
    folders, path, passed_over, part, left = json.loads(ran.stdout)
    assert Path(folders[0]).parent == Path("/dev/shm") and Path(folders[1]).parent == tmp_path
    assert path == str(file_of(Path(folders[1]), 3))
    assert passed_over == [f"{folders[0]}: No space left on device"]
    assert part == "forward_backward" and left == ["page"]


def test_without_any_room_there_are_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NoRoomError, match=r"file/a: Not a directory; .*file/b: Not a directory") as raised:
        Heartbeat([tmp_path / "file" / "a", tmp_path / "file" / "b"], rank=0, attempt=0)
    assert raised.value.exit_code == 1


def test_heartbeats_of_ranks_in_several_folders_are_found_and_removed(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    killed = Heartbeat(folders[1:], rank=1, attempt=0)
    own = Heartbeat(folders, rank=0, attempt=0)
    assert own.path.parent == folders[0]
    beat = own.of_rank(1, 0)
    assert beat is not None and beat.rank == 1 and own.of_rank(1, 1) is None
    folders[1].chmod(0o777)
    assert own.of_rank(1, 0) is None, "whoever may write there decides which process is ended"
    folders[1].chmod(0o700)
    empty = tmp_path / "empty"
    empty.mkdir(mode=0o700)
    Heartbeat([*folders, empty], rank=2, attempt=0).close()
    assert not empty.exists(), "the last rank removes the folder"
    empty.mkdir(mode=0o700)
    Heartbeat([folders[0], empty], rank=2, attempt=0)
    assert empty.exists(), "a rank that starts leaves a folder that another has just made"
    empty.rmdir()
    again = Heartbeat(folders, rank=1, attempt=1)
    assert not killed.path.exists() and again.path.parent == folders[0]
    again.remove(2)
    own.close()
    again.close()
    assert not any(folder.exists() for folder in folders)


def test_a_beat_is_a_matter_of_microseconds(heartbeat: Heartbeat) -> None:
    """Against a loop that does nothing of the kind: a bound that a file write or a system call per beat would break."""
    action, num_beats = Action.parse("0F0"), 2000
    best_seconds = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(num_beats):
            heartbeat.instruction(action)
            heartbeat.wait_begins(CALL)
            heartbeat.wait_ends()
        best_seconds.append((time.perf_counter() - started) / num_beats)
    assert min(best_seconds) < 50e-6


def test_standing_still_counts_where_it_says_something(heartbeat: Heartbeat) -> None:
    assert not may_hang(heartbeat.read()), "before the first step"
    heartbeat.enter(StepPart.DATA)
    assert may_hang(heartbeat.read())
    heartbeat.enter(StepPart.CHECKPOINT)
    assert not may_hang(heartbeat.read()), "its own disk is slow"
    heartbeat.wait_begins(CALL)
    assert may_hang(heartbeat.read())


LIMITS = HangLimits(still_seconds=60.0, first_seconds=0.2, look_seconds=0.02, grace_seconds=0.3)


def test_limits_follow_from_the_one_that_is_given() -> None:
    for seconds in (1.0, 300.0, 3600.0):
        limits = HangLimits.after(seconds, 2 * seconds)
        assert seconds < limits.first_seconds < 2 * seconds
        assert limits.look_seconds <= 5.0 and limits.end_seconds <= 2 * seconds + 30.0


STILL, FIRST = 300.0, 540.0
SECONDS = st.floats(0.0, 2000.0)


def limit_of() -> StillLimit:
    return StillLimit(HangLimits(STILL, FIRST, look_seconds=5.0, grace_seconds=70.0))


@given(st.lists(st.tuples(st.integers(0, 3), SECONDS), max_size=40))
def test_the_limit_is_never_below_the_one_that_is_given_and_bounded_by_what_was_seen(stills) -> None:
    limit, begun, longest = limit_of(), 0, 0.0
    for more_steps, seconds in stills:
        begun += more_steps
        limit.went_on(begun, seconds)
        longest = max(longest, seconds)
        if begun <= 2:
            assert limit.seconds(begun) == FIRST
        else:
            assert STILL <= limit.seconds(begun) <= max(STILL, 2 * longest)


@given(st.floats(0.0, FIRST), st.lists(st.floats(0.51, 1.0), min_size=3, max_size=30), st.floats(0.0, 20.0))
def test_a_run_of_long_steps_does_not_hang(step_seconds: float, parts: list[float], short_seconds: float) -> None:
    """Each step stands still for more than half of the longest one, at its end, and shortly before."""
    limit = limit_of()
    for begun, part in enumerate((0.0, *parts), start=1):
        for seconds in (short_seconds, part * step_seconds):  # the numbers of a step are read in the next one
            assert seconds <= limit.seconds(begun)
            limit.went_on(begun, seconds)


@given(st.floats(0.0, FIRST), st.lists(st.floats(0.0, 100.0), min_size=1, max_size=10))
def test_a_slow_first_step_is_forgotten(first_seconds: float, later: list[float]) -> None:
    limit = limit_of()
    limit.went_on(2, first_seconds)
    assert limit.seconds(3) == max(STILL, 2 * first_seconds)
    for begun, seconds in enumerate(later, start=3):
        limit.went_on(begun, seconds)
    assert limit.seconds(3 + len(later)) == STILL


def test_a_lone_rank_that_stands_still_says_so_and_leaves(heartbeat: Heartbeat, tmp_path: Path) -> None:
    left, told = threading.Event(), []

    def leave(code: int) -> None:
        told.append(code)
        left.set()
        threading.Event().wait()  # as a process that is gone: nothing comes after it

    heartbeat.enter(StepPart.DATA)
    watch = HangWatch(heartbeat, ALONE, tmp_path / "hang", LIMITS, lambda step, text: told.append(text), leave=leave)
    watch.start()
    assert left.wait(30.0)
    text, code = told
    assert code == ExitCode.HUNG and text.startswith("the run hangs in step 1: nothing has moved for 0 seconds.")
    assert "rank 0 (pp 0, dp 0, tp 0) is reading the data of step 1" in text
    report = hang_report(tmp_path / "hang")
    assert report is not None and (report["reporter"], report["text"]) == (0, text)
    assert json.loads((tmp_path / "hang" / "rank_00000.answers.json").read_text())["beat"]["part"] == "data"
    assert not heartbeat.path.exists()


STRANGE = {
    "FIFO": os.mkfifo,
    "folder": Path.mkdir,
    "long": lambda path: path.touch() or os.truncate(path, MOST_BYTES + 1),
    "nested": lambda path: path.write_text("[" * 100_000),
    "list": lambda path: path.write_text("[1]"),
    "other keys": lambda path: path.write_text('{"beat": {"speed": 1}, "reporter": "0"}'),
}
"""By kind, what makes an entry that is no file of the watch."""


@pytest.mark.parametrize("kind", STRANGE)
def test_a_strange_entry_among_the_words_is_passed_over(kind: str, tmp_path: Path) -> None:
    for name in (REPORT, "words.json"):
        STRANGE[kind](tmp_path / name)
    assert hang_report(tmp_path) is None
    assert read_status(tmp_path / "words.json") is None


def test_a_file_of_another_name_does_not_stop_the_watch(heartbeat: Heartbeat, tmp_path: Path) -> None:
    folder = tmp_path / "hang"
    folder.mkdir()
    (folder / "rank_other.answers.json").touch()
    left = threading.Event()
    heartbeat.enter("data")
    limits = HangLimits(0.05, 0.05, 0.01, 0.5)
    watch = HangWatch(heartbeat, ALONE, folder, limits, lambda step, text: None, leave=lambda code: left.set())
    watch.start()
    assert left.wait(30.0)
    watch.close()


def test_a_rank_that_goes_on_takes_its_words_back(heartbeat: Heartbeat, tmp_path: Path) -> None:
    two = RunLayout(RankGrid(ParallelSizes(dp=2)), {"world": [(0, 1)]}, SCHEDULE, SCHEDULE)
    folder, limits = tmp_path / "hang", HangLimits(0.2, 60.0, 0.02, 60.0)
    for _ in range(3):  # the third step is the first with the limit of all others
        heartbeat.enter(StepPart.DATA)
    watch = HangWatch(heartbeat, two, folder, limits, lambda step, text: None, leave=lambda code: None)
    said = io.StringIO()
    with redirect_stderr(said):
        watch.start()
        _until(lambda: (folder / "rank_00000.answers.json").exists())
        heartbeat.enter(StepPart.FORWARD_BACKWARD)
        _until(lambda: not (folder / "rank_00000.answers.json").exists())
        _until(lambda: "went on" in said.getvalue())
    watch.close()
    assert hang_report(folder) is None


def test_a_rank_of_long_steps_is_not_ended(heartbeat: Heartbeat, tmp_path: Path) -> None:
    """It stands still for longer than the limit that was given, as it did in its first step."""
    folder, limits = tmp_path / "hang", HangLimits(0.05, 60.0, 0.01, 60.0)
    watch = HangWatch(heartbeat, ALONE, folder, limits, lambda step, text: None, leave=lambda code: None)
    watch.start()
    for _ in range(4):
        heartbeat.enter(StepPart.DATA)
        time.sleep(0.2)
        assert not list(folder.glob("*.answers.json"))
    watch.close()


@pytest.mark.parametrize("builds", [True, False])
def test_a_rank_that_builds_an_order_is_not_ended(builds: bool, heartbeat: Heartbeat, tmp_path: Path) -> None:
    """The build takes ten times as long as a rank may stand still."""
    left = threading.Event()
    heartbeat.enter(StepPart.DATA)
    limits = HangLimits(0.05, 0.05, 0.01, 0.05)
    watch = HangWatch(heartbeat, ALONE, tmp_path / "hang", limits, lambda *_: None, leave=lambda code: left.set())
    watch.start()
    for _ in range(50):
        if builds:
            heartbeat.builds()
        left.wait(0.01)
    heartbeat.has_built()
    watch.close()
    assert left.is_set() != builds


def test_ranks_that_wait_for_one_that_builds_take_their_words_back(tmp_path: Path) -> None:
    """Rank 0 stands in a call of rank 1, which is on another node and builds; once it builds no more, it is a hang."""
    two = RunLayout(RankGrid(ParallelSizes(dp=2), 1), {"world": [(0, 1)]}, SCHEDULE, SCHEDULE)
    folder, left, over = tmp_path / "hang", threading.Event(), threading.Event()
    limits = HangLimits(0.1, 0.1, 0.01, 0.2)
    beats = [Heartbeat([tmp_path / f"node{rank}"], rank, 0) for rank in range(2)]
    for each in beats:
        each.enter(StepPart.DATA)
    beats[1].builds()
    watches = [
        HangWatch(each, two, folder, limits, lambda *_: None, leave=lambda code: (left.set(), over.wait(60.0))[0])
        for each in beats
    ]
    said = io.StringIO()
    with redirect_stderr(said):
        for watch in watches:
            watch.start()
        for _ in range(100):
            beats[1].builds()
            time.sleep(0.01)
        assert not left.is_set() and "waits for a rank that builds the order of an epoch" in said.getvalue()
        beats[1].has_built()
        assert left.wait(30.0)
        for watch in watches:
            watch.close()
        over.set()


def test_one_rank_of_a_node_lists_the_words_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 of a node is silent. Rank 1 waits beside rank 0, which has answered before it, and lists once, in the end."""
    three = RunLayout(RankGrid(ParallelSizes(dp=3)), {"world": [(0, 1, 2)]}, SCHEDULE, SCHEDULE)
    folder, listings = tmp_path / "hang", []
    folder.mkdir()
    (folder / "rank_00000.answers.json").write_text("{}")
    heartbeat = Heartbeat([tmp_path / "shm"], 1, 0)
    heartbeat.enter(StepPart.DATA)
    left: list[int] = []
    watch = HangWatch(heartbeat, three, folder, LIMITS, lambda step, text: None, leave=left.append)
    ranks = watch._ranks
    monkeypatch.setattr(watch, "_ranks", lambda kind: (listings.append(kind), ranks(kind))[1])
    watch._hangs(heartbeat.read(), 1.0)
    assert listings == ["answers"] and left == [ExitCode.HUNG]
    assert not (folder / "rank_00002.silent.json").exists(), "its deputy is rank 0"


def _until(is_true: object, within_seconds: float = 30.0) -> None:
    deadline = time.monotonic() + within_seconds
    while not is_true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_the_backend_remembers_is_written_where_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.write_flight_record(tmp_path / "none.json")
    monkeypatch.setattr(runtime.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(runtime.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(runtime._c10d, "_dump_nccl_trace_json", lambda: b"{}", raising=False)
    runtime.write_flight_record(tmp_path / "some.json")
    assert [path.name for path in tmp_path.iterdir()] == ["some.json"]
