"""The timeline of one rank, and the file that is made of all of them."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from triaxis.engine.errors import TriaxisError
from triaxis.engine.pipeline.actions import Action, Kind, Placement
from triaxis.engine.pipeline.lowering import Post, Transfer
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.telemetry.timing.marks import Activity
from triaxis.engine.telemetry.timing.timeline import RowIdentity, Timeline, merge
from triaxis.launch import cli


@dataclass(frozen=True)
class Call:
    op: str
    axis: str
    purpose: str


F3, B1 = Action(Kind.F, 1, 3), Action(Kind.B, 0, 1)
TP = Call("all_reduce", "tp", "mlp forward")
READ = Call("host_read", "", "experts counts")
POST = Post("forward", (Transfer("forward", 1, 0, 4, 3), Transfer("forward", 0, 1, 1, 2)))
BACK = Post("backward", (Transfer("backward", 1, 0, 2, 1), Transfer("backward", 0, 1, 3, 0)))


def write_row(run: Path, rank: int, world_size: int = 2, attempt: int = 0) -> None:
    row = RowIdentity(rank, world_size, f"pp {rank}  host{rank}", rank, Placement(2, 3))
    path = run / "timeline" / f"attempt_{attempt:02d}" / f"rank_{rank:05d}.json"
    timeline = Timeline(range(7, 8), row, path)
    timeline.set_clock(1000.0, 25e-6 * rank)
    part = "forward_backward"
    activities = [
        Activity(StepPart.DATA),
        Activity(part, F3),
        Activity(part, F3, TP),
        Activity(part, F3, READ),
        Activity(part, F3),
    ]
    activities += [Activity(part, POST), Activity(part, B1), Activity(part, BACK), Activity(StepPart.OPTIMIZER)]
    timeline.add(7, activities, [1000.0 + 0.1 * place for place in range(len(activities) + 1)])
    timeline.write()
    written = path.stat().st_mtime_ns
    timeline.write()
    assert path.stat().st_mtime_ns == written, "nothing new"


def test_a_row_has_nested_slices_named_as_in_the_schedule(tmp_path: Path) -> None:
    write_row(tmp_path, 0)
    write_row(tmp_path, 1)
    merged = merge(tmp_path)
    assert merged.path == tmp_path / "timeline.json" and merged.missing == ()
    assert "timeline of 2 ranks" in str(merged) and "25 µs" in str(merged)
    content = json.loads(merged.path.read_text())
    events = content["traceEvents"]
    names = [each["args"]["name"] for each in events if each["name"] == "thread_name"]
    assert names == ["rank 0  pp 0  host0", "rank 1  pp 1  host1  ±25 µs"]
    slices = [each for each in events if each["ph"] == "X"]
    first = [(each["cat"], each["name"], each["ts"], each["dur"]) for each in slices if each["tid"] == 0]
    assert first == [
        ("step", "step 7", 0.0, 900000.0),
        ("part", "data", 0.0, 100000.0),
        ("part", "forward_backward", 100000.0, 700000.0),
        ("part", "optimizer", 800000.0, 100000.0),
        ("action", "1F3", 100000.0, 400000.0),
        ("transfer", "receive 2F3 from pp 1, send 0F2 to pp 1", 500000.0, 100000.0),
        ("action", "0B1", 600000.0, 100000.0),
        ("transfer", "receive 1B1 from pp 1, send 2B0 to pp 1", 700000.0, 100000.0),
        ("wait", "wait tp", 200000.0, 100000.0),
        ("wait", "host read", 300000.0, 100000.0),
    ]
    waits = [each["args"] for each in slices if each["cat"] == "wait"]
    assert (
        waits
        == [
            {"purpose": "mlp forward", "op": "all_reduce"},
            {"purpose": "experts counts", "op": "host_read"},
        ]
        * 2
    )
    # The same post as the other rank sees it.
    assert any(each["name"] == "send 1F3 to pp 0, receive 0F2 from pp 0" for each in slices if each["tid"] == 1)
    assert {each["pid"] for each in events} == {0}


def test_the_latest_attempt_counts_and_a_rank_that_wrote_nothing_is_named(tmp_path: Path) -> None:
    for rank in range(2):
        write_row(tmp_path, rank)
    write_row(tmp_path, 2, world_size=4, attempt=1)
    merged = merge(tmp_path)
    assert merged.num_ranks == 1 and merged.missing == (0, 1, 3)
    assert str(merged).endswith("; missing ranks: 0, 1, 3")


def test_entries_that_no_rank_wrote_are_passed_over_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    for attempt in (9, 100):
        write_row(tmp_path, 0, attempt=attempt)
    (tmp_path / "timeline" / "attempt_old").mkdir()
    (tmp_path / "timeline" / "attempt_100" / "rank_old.json").write_text("{}")
    assert merge(tmp_path).num_ranks == 1
    os.mkfifo(tmp_path / "timeline" / "attempt_100" / "rank_00001.json")
    with pytest.raises(TriaxisError, match=r"rank_00001\.json is not a rank's timeline .*it is a FIFO"):
        merge(tmp_path)


def test_the_command_says_where_it_is_or_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path), "--timeline"]) != 0
    assert "holds no rank's timeline" in capsys.readouterr().err
    write_row(tmp_path, 0, world_size=1)
    assert cli.main(["report", str(tmp_path), "--timeline"]) == 0
    assert str(tmp_path / "timeline.json") in capsys.readouterr().out


@pytest.mark.parametrize("content", ["{", "[]", '{"traceEvents": []}', '{"traceEvents": [], "otherData": {}}'])
def test_what_is_no_timeline_is_refused_by_name(tmp_path: Path, content: str) -> None:
    write_row(tmp_path, 0)
    (tmp_path / "timeline" / "attempt_00" / "rank_00001.json").write_text(content)
    with pytest.raises(TriaxisError, match=r"rank_00001\.json is not a rank's timeline"):
        merge(tmp_path)
    assert not (tmp_path / "timeline.json").exists()
