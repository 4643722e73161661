"""The facade and the observer: every step once in every sink, with its validation; failing sinks never stop a run."""

import errno
import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch

from tests.full_disk import room_for
from triaxis.engine.config.quantities.plan import batch_plan
from triaxis.engine.config.schema.telemetry import SINKS, TelemetryConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import TriaxisError
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.step_result import StepResult
from triaxis.engine.telemetry.observer import TrainingObserver, peak_memory_bytes
from triaxis.engine.telemetry.outlets import sink as sink_module
from triaxis.engine.telemetry.outlets.charts import Charts
from triaxis.engine.telemetry.outlets.console import Report
from triaxis.engine.telemetry.outlets.hub import Telemetry, open_telemetry
from triaxis.engine.telemetry.outlets.rank_log import RankStreams
from triaxis.engine.telemetry.outlets.sink import Sink, chosen_sinks
from triaxis.engine.telemetry.outlets.tensorboard import TensorBoardSink
from triaxis.engine.telemetry.outlets.terminal import Terminal
from triaxis.engine.telemetry.outlets.wandb import WandbSink
from triaxis.engine.telemetry.record.events import EventLog
from triaxis.engine.telemetry.record.metrics import Meter, StepMetrics
from triaxis.engine.telemetry.timing.timers import Timers

MakeConfig = Callable[..., Config]
MakeMetrics = Callable[..., StepMetrics]


class Memory(Sink):
    """A sink that keeps what it got, and fails when told to."""

    name = "memory"

    def __init__(self, fails_at: int | None = None) -> None:
        self.records: list[StepMetrics] = []
        self.is_closed = False
        self._fails_at = fails_at

    @classmethod
    def open(cls, config: Config, directory: RunDirectory, layout: Mapping[str, Any]) -> Self:
        return cls()

    def record(self, metrics: StepMetrics) -> None:
        if metrics.step == self._fails_at:
            raise OSError("No space left on device")
        self.records.append(metrics)

    def close(self) -> None:
        self.is_closed = True


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_reaches_the_sinks_once_and_with_the_validation_that_followed_it(make_metrics: MakeMetrics) -> None:
    sink = Memory()
    telemetry = Telemetry(sinks=[sink])
    telemetry.step(make_metrics(step=1))
    telemetry.flush()
    telemetry.step(make_metrics(step=2))
    telemetry.validation(2, 2.5, 1.0)
    telemetry.step(make_metrics(step=3))
    telemetry.step(make_metrics(step=4))
    telemetry.close()
    telemetry.close()
    assert [(record.step, record.val_loss) for record in sink.records] == [(1, None), (2, 2.5), (3, None), (4, None)]
    assert sink.is_closed


def test_a_failing_sink_is_an_event_and_a_line_and_the_others_go_on(make_metrics: MakeMetrics, tmp_path: Path) -> None:
    broken, whole, screen = Memory(fails_at=2), Memory(), io.StringIO()
    lines = Report(9, 1, terminal=screen, log=None, show_mfu=False)
    telemetry = Telemetry(lines, EventLog(tmp_path / "events.jsonl", 0), [broken, whole])
    for step in range(1, 6):
        telemetry.step(make_metrics(step=step))
    telemetry.close()
    assert [record.step for record in broken.records] == [1]
    assert [record.step for record in whole.records] == [1, 2, 3, 4, 5]
    failed = [event for event in read(tmp_path / "events.jsonl") if event["kind"] == "sink_failed"]
    assert [(event["sink"], event["error"]) for event in failed] == [("memory", "OSError: No space left on device")]
    assert screen.getvalue().count("memory is switched off, training goes on") == 1


def test_a_sink_that_has_failed_is_opened_again_and_its_missing_steps_are_counted(
    make_metrics: MakeMetrics, tmp_path: Path
) -> None:
    opened, clock, screen = [], Clock(), io.StringIO()
    is_full = False

    class Full(Memory):
        def __init__(self) -> None:
            super().__init__()
            opened.append(self)
            if is_full:
                raise OSError(errno.ENOSPC, "No space left on device")

        def record(self, metrics: StepMetrics) -> None:
            if is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().record(metrics)

    lines = Report(9, 100, terminal=screen, log=None, show_mfu=False)
    telemetry = Telemetry(lines, EventLog(tmp_path / "events.jsonl", 0), clock=clock)
    telemetry.add_sink("memory", Full)
    for step in range(1, 121):
        is_full = 3 <= step <= 90 or step > 110
        telemetry.step(make_metrics(step=step))
        telemetry.flush()
        clock.seconds += 1.0
    telemetry.close()
    # It is tried 30 seconds after step 3, which fails, and 60 seconds after that.
    assert len(opened) == 3 and opened[0].is_closed
    assert [record.step for sink in opened for record in sink.records] == [1, 2, *range(93, 111)]
    events = read(tmp_path / "events.jsonl")[:-1]
    assert [(event["kind"], event["output"], event.get("num_lost")) for event in events] == [
        ("output_stopped", "memory", None),
        ("output_resumed", "memory", 90),
        ("output_stopped", "memory", None),
    ]
    said = screen.getvalue()
    assert (
        said.count("memory cannot be written (No space left on device): training goes on, and writing is tried again")
        == 2
    )
    assert "memory is written again; at least 90 steps are missing" in said
    assert "memory: at least 10 steps are missing: No space left on device" in said


# The thread of TensorBoard's writer says why it ends.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_comes_back_when_there_is_room(
    make_config: MakeConfig, run: RunDirectory, make_metrics: MakeMetrics
) -> None:
    event_file_loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    clock, screen = Clock(), io.StringIO()
    lines = Report(99, 100, terminal=screen, log=None, show_mfu=False)
    telemetry = Telemetry(lines, EventLog(run.events(0), 0), clock=clock)
    telemetry.add_sink(TensorBoardSink.name, lambda: TensorBoardSink(run, Charts.of_run(make_config(), {})))

    def train(first: int, last: int) -> None:
        for step in range(first, last + 1):
            telemetry.step(make_metrics(step=step))
            telemetry.flush()

    train(1, 2)
    (before,) = run.tensorboard.iterdir()
    with room_for(0):
        step = 3
        while "tensorboard cannot be written (File too large)" not in screen.getvalue():
            train(step, step)
            step += 1
        lost_from = step - 1
        clock.seconds += 31.0
        train(step, step + 2)
        assert [*run.tensorboard.iterdir()] == [before], "a try on a full disk leaves no file"
    train(step + 3, step + 4)
    clock.seconds += 61.0
    train(step + 5, step + 6)
    telemetry.close()
    (after,) = {*run.tensorboard.iterdir()} - {before}
    assert {event.step for event in event_file_loader.EventFileLoader(str(after)).Load() if event.step} == {
        step + 5,
        step + 6,
    }
    num_lost = step + 5 - lost_from
    assert screen.getvalue().count(f"tensorboard is written again; at least {num_lost} steps are missing") == 1
    resumed = [event for event in read(run.events(0)) if event["kind"] == "output_resumed"]
    assert ("tensorboard", num_lost) in [(event["output"], event["num_lost"]) for event in resumed]


def test_a_full_disk_keeps_all_rows_and_says_when_it_begins_and_ends(
    make_config: MakeConfig, run: RunDirectory, make_metrics: MakeMetrics
) -> None:
    screen = io.StringIO()
    telemetry = open_telemetry(
        make_config(),
        run,
        is_logging_rank=True,
        streams=RankStreams(io.StringIO(), screen),
        num_steps=30,
        show_mfu=False,
        layout={"tp": 1},
    )
    with room_for(run.events(0).stat().st_size + 30):
        for step in range(1, 8):
            telemetry.step(make_metrics(step=step))
    for step in range(8, 10):
        telemetry.step(make_metrics(step=step))
    telemetry.close()
    assert [record["step"] for record in read(run.metrics)] == list(range(1, 10))
    events = [(event["kind"], event.get("output")) for event in read(run.events(0))]
    files = ["metrics.jsonl", run.events(0).name]
    assert events == [
        ("attempt_started", None),
        *(("output_stopped", name) for name in files),
        *(("output_resumed", name) for name in files),
        ("attempt_ended", None),
    ]
    for name in files:
        assert screen.getvalue().count(f"{name} cannot be written (File too large): training goes on") == 1
        assert screen.getvalue().count(f"{name} is written again; nothing is missing") == 1


def test_a_terminal_that_was_dropped_is_one_event(make_metrics: MakeMetrics, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    terminal = Terminal(writing)
    terminal.write(b"lost")
    terminal.finish()
    telemetry = Telemetry(None, EventLog(tmp_path / "events.jsonl", 0), outputs=[terminal])
    for step in range(1, 4):
        telemetry.step(make_metrics(step=step))
    telemetry.close()
    (dropped, ended) = read(tmp_path / "events.jsonl")
    assert (dropped["kind"], dropped["output"], ended["kind"]) == ("output_dropped", "terminal", "attempt_ended")
    assert dropped["message"] == "the terminal can no longer be written (Broken pipe): the run goes on without it"


def test_a_sink_that_cannot_be_opened_does_not_stop_the_start(
    make_config: MakeConfig, run: RunDirectory, make_metrics: MakeMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("wandb is broken")

    monkeypatch.setattr(WandbSink, "__init__", refuse)
    config = make_config(telemetry={"wandb": {"project": "p"}})
    telemetry = open_on_rank_0(config, run)
    telemetry.step(make_metrics(step=1))
    telemetry.close()
    assert [record["step"] for record in read(run.metrics)] == [1]
    events = [(event["kind"], event.get("sink")) for event in read(run.events(0))]
    assert events == [("attempt_started", None), ("sink_failed", "wandb"), ("attempt_ended", None)]


def open_on_rank_0(config: Config, run: RunDirectory) -> Telemetry:
    return open_telemetry(
        config,
        run,
        is_logging_rank=True,
        streams=RankStreams(io.StringIO(), None),
        num_steps=30,
        show_mfu=False,
        layout={"tp": 1},
    )


TOY = """
from triaxis.engine.telemetry.outlets.sink import Announcement, Sink

class ToySink(Sink):
    name = "toy"
    summary = "toy: good-bye"
    announcement = Announcement("checkpoint_saved", {"folder": "toy"}, "toy: hello")
    calls = []

    @classmethod
    def check(cls):
        cls.calls.append("check")

    @classmethod
    def open(cls, config, directory, layout):
        cls.calls.append(("open", layout["tp"]))
        return cls()

    def record(self, metrics):
        self.calls.append(("record", metrics.step))

    def after_event(self):
        self.calls.append("event")

    def close_early(self, limit_seconds):
        self.calls.append("close early")

    def close(self):
        self.calls.append("close")
"""


def test_a_sink_is_one_file_and_one_row(
    make_config: MakeConfig,
    run: RunDirectory,
    make_metrics: MakeMetrics,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The recipe of docs/extending.md: the hub calls every optional part of a sink that it has never seen."""
    (tmp_path / "toy_sink_of_a_test.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sink_module, "SINKS", {"tensorboard": "toy_sink_of_a_test:ToySink"})
    screen = io.StringIO()
    telemetry = open_telemetry(
        make_config(telemetry={"tensorboard": True}),
        run,
        is_logging_rank=True,
        streams=RankStreams(screen, None),
        num_steps=30,
        show_mfu=False,
        layout={"tp": 2},
    )
    telemetry.step(make_metrics(step=1))
    telemetry.flush()
    telemetry.event("finished")
    telemetry.close_early()
    telemetry.close()
    calls = sys.modules["toy_sink_of_a_test"].ToySink.calls
    expected = ["check", ("open", 2), "event", ("record", 1), "event", "close early", "close"]
    assert calls == expected
    assert "toy: hello" in screen.getvalue() and "toy: good-bye" in screen.getvalue()
    assert [event["folder"] for event in read(run.events(0)) if event["kind"] == "checkpoint_saved"] == ["toy"]


def test_every_sink_of_the_table_has_a_field_of_the_config() -> None:
    for field in SINKS:
        config = TelemetryConfig.model_validate({field: {"project": "p"} if field == "wandb" else True})
        chosen = chosen_sinks(SimpleNamespace(telemetry=config))  # type: ignore[arg-type]
        assert [sink.name for sink in chosen] == ["metrics.jsonl", field]


def test_attempts_append_and_a_killed_one_is_healed_with_an_event(
    make_config: MakeConfig, tmp_path: Path, make_metrics: MakeMetrics
) -> None:
    config = make_config()
    for attempt in range(2):
        run = RunDirectory.create(config, tmp_path / "runs", "demo")
        assert run.attempt == attempt
        telemetry = open_on_rank_0(config, run)
        telemetry.step(make_metrics(step=1, attempt=attempt))
        telemetry.close()
        with run.metrics.open("a") as metrics:
            metrics.write('{"step": 2, "los')
        run.close()
    lines = run.metrics.read_text().splitlines()
    assert [json.loads(line)["attempt"] for line in lines[:2]] == [0, 1]
    (healed,) = [event for event in read(run.events(0)) if event["kind"] == "log_healed"]
    assert (healed["attempt"], healed["file"], healed["bytes_cut_off"]) == (1, "metrics.jsonl", 16)


def test_other_ranks_are_silent_and_write_nothing(
    make_config: MakeConfig, run: RunDirectory, make_metrics: MakeMetrics
) -> None:
    before = sorted(run.path.rglob("*"))
    log = io.StringIO()
    telemetry = open_telemetry(
        make_config(telemetry={"tensorboard": True, "wandb": {"project": "p"}}),
        run,
        is_logging_rank=False,
        streams=RankStreams(log, None),
        num_steps=30,
        show_mfu=False,
        layout={},
    )
    telemetry.step(make_metrics(step=1))
    telemetry.validation(1, 2.0, 1.0)
    telemetry.event("finished")
    telemetry.close()
    assert sorted(run.path.rglob("*")) == before and log.getvalue() == ""


def test_tensorboard_that_is_not_installed_stops_every_rank_at_the_start(
    make_config: MakeConfig, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for is_logging_rank in (True, False):
        with pytest.raises(TriaxisError, match=r"-m pip install -e '.*\[tensorboard\]'"):
            open_telemetry(
                make_config(telemetry={"tensorboard": True}),
                run,
                is_logging_rank=is_logging_rank,
                streams=RankStreams(io.StringIO(), None),
                num_steps=30,
                show_mfu=False,
                layout={},
            )


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def meter(config: Config, **given: Any) -> Meter:
    arguments: dict[str, Any] = {"layers_per_chunk": [2], "world_size": 4, "device_name": "NVIDIA H200", "attempt": 1}
    return Meter(config, batch_plan(config, 1), **arguments | given)


def test_the_observer_counts_from_1_and_keeps_validation_out_of_the_step_time(make_config: MakeConfig) -> None:
    sink, clock = Memory(), Clock()
    lines = Report(30, 10, terminal=io.StringIO(), log=None, show_mfu=False)
    observer = TrainingObserver(
        Telemetry(lines, sinks=[sink]), meter(make_config()), torch.device("cpu"), Timers(clock)
    )
    for step in range(3):
        observer.enter(StepPart.DATA)
        clock.seconds += 0.5
        observer.enter(StepPart.FORWARD_BACKWARD)
        clock.seconds += 1.5
        observer.end_step()
        observer.on_step(step, StepResult(loss=3.0 - step, grad_norm=0.5, num_tokens=100), lr=0.1)
        if step == 1:
            observer.enter(StepPart.VALIDATION)
            clock.seconds += 60.0
            observer.on_validation(step, 2.25)
    observer.enter(StepPart.DATA)
    assert [record.step for record in sink.records] == [1, 2, 3]
    assert [record.val_loss for record in sink.records] == [None, 2.25, None]
    for record in sink.records:
        assert record.step_time_seconds == pytest.approx(2.0) == pytest.approx(sum(record.spans_seconds.values()))
        assert record.consumed_samples == 8 * record.step and record.consumed_tokens == 128 * record.step
        assert record.tokens_per_second == pytest.approx(64.0) and record.loss_tokens == 100
        assert record.attempt == 1 and record.peak_memory_bytes > 10 * 2**20
    assert observer.loss == 1.0 and observer.val_loss == 2.25


def test_speeds_follow_from_flops_devices_and_peak(make_config: MakeConfig) -> None:
    def measure(config: Config, **given: Any) -> StepMetrics:
        return meter(config, **given).measure(
            1,
            loss=1.0,
            loss_tokens=128,
            lr=0.1,
            grad_norm=1.0,
            spans_seconds={StepPart.FORWARD_BACKWARD: 2.0},
            unix_time_seconds=1.0,
            peak_memory_bytes=1,
        )

    base = make_config()
    per_token = meter(base).model_flops_per_token
    plain = measure(base)
    assert plain.model_tflops_per_device == pytest.approx(128 / 2.0 * per_token / 4 / 1e12)
    assert plain.mfu == pytest.approx(plain.model_tflops_per_device / 989.4)
    assert plain.hardware_tflops_per_device > plain.model_tflops_per_device, "257 tokens are padded to 384"

    recomputed = measure(make_config(recompute={"granularity": "full"}))
    assert recomputed.model_tflops_per_device == plain.model_tflops_per_device
    assert recomputed.hfu is not None and plain.hfu is not None and recomputed.hfu > 1.2 * plain.hfu

    unknown = measure(base, device_name="cpu")
    assert unknown.mfu is None and unknown.hfu is None
    said = measure(make_config(telemetry={"peak_tflops": 2.0}), device_name="cpu")
    assert said.mfu == pytest.approx(plain.model_tflops_per_device / 2.0)


@pytest.mark.slow
def test_peak_memory_grows_with_what_was_allocated() -> None:
    before = peak_memory_bytes(torch.device("cpu"))
    block = torch.ones(before + 64 * 2**20, dtype=torch.uint8)
    assert peak_memory_bytes(torch.device("cpu")) >= before + 60 * 2**20
    del block
