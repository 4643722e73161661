"""JSON lines: every digit kept, there at once, and whole again after a run was killed while writing."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.full_disk import room_for
from triaxis.engine.telemetry.outlets.metrics_log import MetricsLog
from triaxis.engine.telemetry.record import jsonl
from triaxis.engine.telemetry.record.events import EventLog
from triaxis.engine.telemetry.record.jsonl import JsonLines, heal
from triaxis.engine.telemetry.record.metrics import StepMetrics


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"step": 1})
    assert read(tmp_path / "m.jsonl") == [{"step": 1}]
    lines.write({"step": 2, "name": "Größe"})
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1}\n{"step": 2, "name": "Größe"}\n'
    lines.close()


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_come_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.getbasetemp() / "floats.jsonl"
    lines = JsonLines(path)
    lines.write({"value": value})
    lines.close()
    back = read(path)[-1]["value"]
    assert isinstance(back, float) and back.hex() == value.hex()


def test_what_json_has_no_number_for_is_a_string(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"loss": math.nan, "spans": {"data": math.inf}, "all": [-math.inf, 1.0]})
    lines.close()
    assert read(tmp_path / "m.jsonl") == [{"loss": "nan", "spans": {"data": "inf"}, "all": ["-inf", 1.0]}]


@pytest.mark.parametrize("length", [1, 10, 200_000])
def test_a_half_written_line_is_cut_off_and_the_next_attempt_appends(tmp_path: Path, length: int) -> None:
    path = tmp_path / "m.jsonl"
    half = '{"step": 2, "x": "' + "y" * length
    path.write_text('{"step": 1}\n' + half)
    lines = JsonLines(path)
    assert lines.num_healed_bytes == len(half)
    lines.write({"step": 2})
    lines.close()
    assert read(path) == [{"step": 1}, {"step": 2}]


def test_a_half_written_first_line_leaves_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"st')
    assert heal(path) == 4
    assert path.read_text() == ""


def test_a_line_that_lacks_only_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    assert heal(path) == 0
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_whole_file_and_a_missing_one_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    assert heal(path) == 0 and not path.exists()
    path.write_text('{"step": 1}\n')
    assert heal(path) == 0 and path.read_text() == '{"step": 1}\n'


def test_val_loss_stands_in_a_record_only_where_a_validation_was(
    tmp_path: Path, make_metrics: Callable[..., StepMetrics]
) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    log.record(make_metrics(step=1))
    log.record(make_metrics(step=2, val_loss=2.5))
    log.close()
    first, second = read(tmp_path / "m.jsonl")
    assert "val_loss" not in first and second["val_loss"] == 2.5
    promised = {"step", "attempt", "consumed_samples", "consumed_tokens", "loss", "lr", "grad_norm"}
    assert promised | {"step_time_seconds", "tokens_per_second"} <= set(first)


def test_events_carry_their_attempt_and_time(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl", attempt=3)
    events.write("sink_failed", sink="wandb", error="no disk")
    events.close()
    (event,) = read(tmp_path / "events.jsonl")
    assert isinstance(event.pop("unix_time_seconds"), float)
    assert event == {"attempt": 3, "kind": "sink_failed", "sink": "wandb", "error": "no disk"}


@pytest.mark.parametrize("room", [0, 1, 12, 13, 23, 24, 25])
def test_rows_wait_for_room_and_none_is_torn(tmp_path: Path, room: int) -> None:
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path)
    with room_for(room):
        for step in range(1, 4):
            lines.write({"step": step})
        assert lines.error is not None and lines.error.strerror == "File too large"
        lines.retry()
        assert path.stat().st_size == room
    lines.write({"step": 4})
    assert lines.error is None and lines.num_lost == 0
    lines.close()
    assert read(path) == [{"step": step} for step in range(1, 5)]


def test_a_torn_row_behind_which_another_process_wrote_is_ended_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path)
    with room_for(5):
        lines.write({"step": 1})
    with path.open("a") as other:
        other.write('\n{"other": 1}\n')
    lines.write({"step": 2})
    lines.close()
    assert path.read_text() == '{"ste\n{"other": 1}\n\n{"step": 1}\n{"step": 2}\n'


def test_rows_beyond_the_bound_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MOST_WAITING_BYTES", 30)
    lines = JsonLines(tmp_path / "m.jsonl")
    with room_for(0):
        for step in range(1, 6):
            lines.write({"step": step})
    lines.retry()
    assert read(tmp_path / "m.jsonl") == [{"step": 1}, {"step": 2}] and lines.num_lost == 3
    with room_for(0):
        lines.write({"step": 6})
        lines.close()
    assert lines.num_lost == 4 and lines.error is not None
