"""events.jsonl: every rank may tell, nothing is lost to a torn line, nothing secret gets in."""

import json
import math
import threading
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.telemetry.events import ALERTS, Event, EventKind, EventLog, read_events
from engine.telemetry.redaction import REDACTED, without_secrets

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
    path = tmp_path / "events.jsonl"
    assert read_events(path).events == []
    log = EventLog(path, attempt=2)
    log.write("non_finite", step=7, message="loss is nan", loss=math.nan)
    first = read_events(path)
    (event,) = first.events
    assert (event.kind, event.attempt, event.step, event.rank) == ("non_finite", 2, 7, None)
    assert (event.message, event.details) == ("loss is nan", {"loss": "nan"})
    with path.open("a") as file:
        file.write('{"unix_time_seconds": 5.0, "attempt": 2, ')
    torn = read_events(path, first.end)
    assert (torn.events, torn.num_unreadable, torn.end) == ([], 1, first.end)
    with path.open("a") as file:
        file.write('"kind": "hang"}\n[1, 2]\n{"kind": 5}\n\n')
    rest = read_events(path, first.end)
    assert [event.kind for event in rest.events] == ["hang"]
    assert (rest.num_unreadable, rest.end) == (2, path.stat().st_size)


def test_another_rank_ends_a_torn_line_and_cuts_nothing_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"half a li')
    EventLog(path, attempt=0, rank=3).write("hang", step=1, message="waits")
    assert path.read_text().startswith('{"half a li\n{')
    read = read_events(path)
    assert [(event.kind, event.rank) for event in read.events] == [("hang", 3)] and read.num_unreadable == 1
    log = EventLog(path, attempt=1)
    log.write("slow_rank", rank=5)
    assert [event.rank for event in read_events(path).events] == [3, 5]


def test_lines_of_many_writers_do_not_mix(tmp_path: Path) -> None:
    path, text = tmp_path / "events.jsonl", "x" * 20_000

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
    read = read_events(path)
    assert read.num_unreadable == 0 and all(event.message == text for event in read.events)
    assert sorted((event.rank, event.step) for event in read.events) == [(r, s) for r in range(1, 5) for s in range(20)]


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
