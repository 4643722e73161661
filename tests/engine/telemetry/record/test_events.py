"""Events: any rank may write them, all nodes are read as one, a torn line loses nothing, and no secret gets in."""

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.config.tree import Config
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.run.entries import OLD_FILE, events_file, events_files
from triaxis.engine.storage.redaction import REDACTED, without_secrets
from triaxis.engine.telemetry.record.events import ALERTS, Event, EventKind, EventLog, read_events

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.text(min_size=1, max_size=8).filter(
    lambda name: name not in {"unix_time_seconds", "attempt", "kind", "step", "rank", "message"}
)


@settings(deadline=None)
@given(
    event=st.builds(
        Event,
        unix_time_seconds=st.floats(0, 1e11),
        attempt=st.integers(0, 99),
        kind=st.sampled_from(get_args(EventKind)),
        step=st.none() | st.integers(0),
        rank=st.none() | st.integers(0),
        message=st.text(),
        details=st.dictionaries(NAMES, JSON, max_size=4),
    )
)
def test_an_event_is_read_as_it_was_written(event: Event) -> None:
    assert Event.from_record(json.loads(json.dumps(event.to_record()))) == event


def test_every_alert_is_a_kind() -> None:
    assert set(ALERTS) <= set(get_args(EventKind))


def test_a_torn_end_is_left_out_and_read_on_from_when_it_is_whole(tmp_path: Path) -> None:
    path = events_file(tmp_path, node=0)
    assert read_events(tmp_path).events == []
    log = EventLog(path, attempt=2)
    log.write("non_finite", step=7, message="loss is nan", loss=math.nan)
    first = read_events(tmp_path)
    (event,) = first.events
    assert (event.kind, event.attempt, event.step, event.rank) == ("non_finite", 2, 7, None)
    assert (event.message, event.details) == ("loss is nan", {"loss": "nan"})
    with path.open("a") as file:
        file.write('{"unix_time_seconds": 5.0, "attempt": 2, ')
    torn = read_events(tmp_path, first.ends)
    assert (torn.events, torn.num_unreadable, torn.ends) == ([], 1, first.ends)
    with path.open("a") as file:
        file.write('"kind": "hang"}\n[1, 2]\n{"kind": 5}\n\n')
    rest = read_events(tmp_path, first.ends)
    assert [event.kind for event in rest.events] == ["hang"]
    assert (rest.num_unreadable, rest.ends) == (2, {"events/node_00000.jsonl": path.stat().st_size})


def test_another_rank_ends_a_torn_line_and_cuts_nothing_off(tmp_path: Path) -> None:
    path = events_file(tmp_path, node=0)
    path.parent.mkdir()
    path.write_text('{"half a li')
    EventLog(path, attempt=0, rank=3).write("hang", step=1, message="waits")
    assert path.read_text().startswith('{"half a li\n{')
    read = read_events(tmp_path)
    assert [(event.kind, event.rank) for event in read.events] == [("hang", 3)] and read.num_unreadable == 1
    log = EventLog(path, attempt=1)
    log.write("slow_rank", rank=5)
    assert [event.rank for event in read_events(tmp_path).events] == [3, 5]


def write_at(path: Path, seconds: float, step: int, attempt: int = 0) -> None:
    """Append an event of some time."""
    path.parent.mkdir(exist_ok=True)
    record = Event(unix_time_seconds=seconds, attempt=attempt, kind="slow_rank", step=step).to_record()
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_events_of_all_nodes_are_read_as_one_by_time(tmp_path: Path) -> None:
    first, second = events_file(tmp_path, node=0), events_file(tmp_path, node=11)
    write_at(first, 10.0, step=1)
    write_at(second, 11.0, step=2)
    write_at(first, 12.0, step=3)
    read = read_events(tmp_path)
    assert [event.step for event in read.events] == [1, 2, 3]
    write_at(second, 13.0, step=4)
    write_at(events_file(tmp_path, node=2), 12.5, step=5)
    rest = read_events(tmp_path, read.ends)
    assert [event.step for event in rest.events] == [5, 4], "only what was appended, and files that are new"
    assert [event.step for event in read_events(tmp_path).events] == [1, 2, 3, 5, 4]


def test_an_attempts_events_stay_together_and_a_files_lines_in_order(tmp_path: Path) -> None:
    """The second node's clock is 100 s ahead, and the first one's was set back by 5 s in attempt 1."""
    first, second = events_file(tmp_path, node=0), events_file(tmp_path, node=1)
    write_at(first, 10.0, step=1)
    write_at(second, 110.0, step=2)
    write_at(first, 20.0, step=3, attempt=1)
    write_at(first, 15.0, step=4, attempt=1)
    write_at(second, 121.0, step=5, attempt=1)
    assert [event.step for event in read_events(tmp_path).events] == [1, 2, 3, 4, 5]


def test_the_one_file_of_an_older_run_is_still_read(tmp_path: Path) -> None:
    write_at(tmp_path / OLD_FILE, 10.0, step=1)
    write_at(tmp_path / OLD_FILE, 30.0, step=2)
    assert [event.step for event in read_events(tmp_path).events] == [1, 2]
    write_at(events_file(tmp_path, node=0), 20.0, step=3, attempt=1)
    assert [event.step for event in read_events(tmp_path).events] == [1, 2, 3], "a later attempt has files per node"


def test_lines_of_many_writers_do_not_mix(tmp_path: Path) -> None:
    path, text = events_file(tmp_path, node=0), "x" * 20_000

    def tell(rank: int) -> None:
        log = EventLog(path, attempt=0, rank=rank)
        for step in range(20):
            log.write("slow_rank", step=step, message=text)
        log.close()

    writers = [threading.Thread(target=tell, args=(rank,)) for rank in range(1, 5)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    read = read_events(tmp_path)
    assert read.num_unreadable == 0 and all(event.message == text for event in read.events)
    assert sorted((event.rank, event.step) for event in read.events) == [(r, s) for r in range(1, 5) for s in range(20)]


def test_a_node_appends_to_its_own_file_in_every_attempt(tmp_path: Path, make_config: Callable[..., Config]) -> None:
    for attempt in range(2):
        run = RunDirectory.create(make_config(), tmp_path, "demo")
        EventLog(run.events(node=0), run.attempt).write("attempt_started")
        other = RunDirectory.join(tmp_path, "demo", run.attempt)
        EventLog(other.events(node=300), run.attempt, rank=2400).write("hang", step=5, message="waits")
        run.close()
        assert [event.attempt for event in read_events(run.path).events] == [0, 0, 1, 1][: 2 * attempt + 2]
    assert [path.name for path in events_files(run.path)] == ["node_00000.jsonl", "node_00300.jsonl"]


@pytest.mark.parametrize(
    ("variables", "text", "written"),
    [
        ({"WANDB_API_KEY": "0123456789abcdef"}, "401 for key=0123456789abcdef", f"401 for key={REDACTED}"),
        ({"HF_TOKEN": "hf_long_enough", "X": "hf_long"}, "hf_long_enough hf_long", f"{REDACTED} hf_long"),
        ({"DB_PASSWORD": "shorter"}, "shorter is a word", "shorter is a word"),
        ({"A_TOKEN": "abcdefgh", "B_TOKEN": "abcdefghij"}, "abcdefghij", REDACTED),
        ({"PATH": "/usr/local/bin"}, "/usr/local/bin/x", "/usr/local/bin/x"),
    ],
)
def test_secrets_are_blotted_out(variables: dict[str, str], text: str, written: str) -> None:
    assert without_secrets(text, variables) == written


def test_an_event_never_quotes_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "marker-0123456789")
    details: dict[str, Any] = {"error": "refused marker-0123456789", "other": 5}
    EventLog(tmp_path / "events.jsonl", 0).write("sink_failed", message="says marker-0123456789", **details)
    assert "marker" not in (tmp_path / "events.jsonl").read_text()
