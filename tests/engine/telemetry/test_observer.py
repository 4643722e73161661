"""What the observer of the loop makes of a step where ranks share rows."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.context_parallel.test_deal import batch_of
from triaxis.engine.config.quantities.plan import batch_plan, parallel_sizes
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.tree import Config
from triaxis.engine.context_parallel.cut import ContextCut
from triaxis.engine.context_parallel.imbalance import imbalance, work_of_ranks
from triaxis.engine.kernels.fusion import Fusion
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.step_result import Skip, StepResult
from triaxis.engine.telemetry.meters.result_numbers import LossScales, Outliers
from triaxis.engine.telemetry.observer import TrainingObserver
from triaxis.engine.telemetry.outlets.console import Report
from triaxis.engine.telemetry.outlets.hub import Telemetry
from triaxis.engine.telemetry.record.events import EventLog
from triaxis.engine.telemetry.record.metrics import Meter, StepMetrics


def meter_of(config: Config) -> Meter:
    sizes = parallel_sizes(config, None)
    plan = batch_plan(config, sizes.dp)
    return Meter(config, plan, layers_per_chunk=[2], world_size=sizes.world_size, device_name="cpu", attempt=0)


def test_a_record_has_the_imbalance_of_its_own_step(
    make_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's numbers come when the next one is posted, and the third step has whole rows."""
    config, records = make_config(parallel={"dp": 1}), list[StepMetrics]()
    report = Report(30, 10, terminal=io.StringIO(), log=None, show_mfu=False)
    telemetry = Telemetry(report, EventLog(tmp_path / "events.jsonl", 0))
    monkeypatch.setattr(telemetry, "step", records.append)
    observer = TrainingObserver(telemetry, meter_of(config), torch.device("cpu"))
    steps = [[[[3, 9, 4], [16]], [[15, 1], [1, 15]]], [[[2, 14], [16]]]]
    cut = ContextCut(2, 0, {None: 2})
    for number, step in enumerate([*steps, None]):
        observer.enter(StepPart.DATA)
        whole = [replace(batch_of([[16]]), documents=None)]
        observer.on_batch([cut(batch_of(rows)) for rows in step] if step else [cut(each) for each in whole])
        observer.end_step()
        if number:
            observer.on_step(number - 1, StepResult(loss=3.0, grad_norm=0.5, num_tokens=100), lr=0.1)
    observer.on_step(2, StepResult(loss=3.0, grad_norm=0.5, num_tokens=100), lr=0.1)
    expected = [imbalance([work_of_ranks(rows, 2, {None: 2}) for rows in step]) for step in steps]
    assert [record.cp_imbalance for record in records] == [*expected, None]
    assert min(expected) >= 1.0 and expected[0] != expected[1]


def test_overflows_are_counted(make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    records = list[StepMetrics]()
    telemetry = Telemetry(Report(30, 10, terminal=io.StringIO(), log=None, show_mfu=False))
    monkeypatch.setattr(telemetry, "step", records.append)
    observer = TrainingObserver(
        telemetry, meter_of(make_config(parallel={"dp": 1})), torch.device("cpu"), meters=[LossScales()]
    )
    steps: list[tuple[float | None, Skip]] = [(8.0, "overflowed"), (4.0, ""), (4.0, "overflowed"), (None, "")]
    for step, (scale, skip) in enumerate(steps):
        observer.enter(StepPart.DATA)
        observer.end_step()
        observer.on_step(step, StepResult(3.0, 0.5, 100, loss_scale=scale, skip=skip), lr=0.1)
    found = [record.to_record() for record in records]
    assert [(each.get("loss_scale"), each.get("num_overflows")) for each in found] == [
        (8, 1),
        (4, 1),
        (4, 2),
        (None, None),
    ]


def test_outliers_are_counted(make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    records = list[StepMetrics]()
    telemetry = Telemetry(Report(30, 10, terminal=io.StringIO(), log=None, show_mfu=False))
    monkeypatch.setattr(telemetry, "step", records.append)
    observer = TrainingObserver(
        telemetry, meter_of(make_config(parallel={"dp": 1})), torch.device("cpu"), meters=[Outliers()]
    )
    skips: list[Skip] = ["", "outlier", "", "outlier"]
    for step, skip in enumerate(skips):
        observer.enter(StepPart.DATA)
        observer.end_step()
        observer.on_step(step, StepResult(3.0, 0.5, 100, skip=skip), lr=0.1)
    assert [record.to_record().get("num_outliers") for record in records] == [None, 1, 1, 2]
    lines = [each.line for record in records[::3] for each in record.measured]
    assert lines == ["2 outlier updates skipped"] and "num_outliers" not in records[0].to_record()
    observer.end_step()
    observer.on_step(4, StepResult(0.0, 0.5, num_tokens=0), lr=0.1)
    assert observer.loss == 3.0, "a step without labels has no loss"
    assert records[3].measured[0].charts["health/num_outliers"] == records[3].to_record()["num_outliers"] == 2


def test_compilation_is_reported_once(make_config: Callable[..., Config]) -> None:
    terminal = io.StringIO()
    telemetry = Telemetry(Report(30, 10, terminal=terminal, log=None, show_mfu=False))
    fusion, other = Fusion("compiled"), Fusion("eager")
    negative = fusion(torch.neg)
    observer = TrainingObserver(
        telemetry, meter_of(make_config(parallel={"dp": 1})), torch.device("cpu"), fusions=[fusion, other]
    )
    for step in range(3):
        observer.enter(StepPart.DATA)
        for length in (2, 3, 2):
            negative(torch.ones(length + step))
        observer.end_step()
        observer.on_step(step, StepResult(3.0, 0.5, 100), lr=0.1)
    telemetry.close()
    assert len(fusion.compile_seconds) == 4 and min(fusion.compile_seconds) > 0
    lines = [line for line in terminal.getvalue().splitlines() if "compiled" in line]
    assert lines == [f"compiled 2 functions in {sum(fusion.compile_seconds[:2]):.1f} s, during the first step"]


def test_flops_per_second_count_global_tokens_and_all_ranks(make_config: Callable[..., Config]) -> None:
    """A sample's tokens are counted once however many ranks share them, and each of these ranks is a device."""
    plain = make_config(parallel={"dp": 1})
    cut = with_value(plain, "parallel.cp", 4)
    whole, shared = (
        meter_of(config).measure(
            1,
            loss=1.0,
            loss_tokens=1,
            lr=0.1,
            grad_norm=1.0,
            spans_seconds={StepPart.FORWARD_BACKWARD: 2.0},
            unix_time_seconds=0.0,
            peak_memory_bytes=0,
        )
        for config in (plain, cut)
    )
    tokens = plain.train.global_batch_size * plain.model.seq_length
    assert shared.tokens_per_second == whole.tokens_per_second == tokens / 2
    assert shared.consumed_tokens == whole.consumed_tokens == tokens
    for name in ("model_tflops_per_device", "hardware_tflops_per_device"):
        assert getattr(shared, name) == getattr(whole, name) / 4
