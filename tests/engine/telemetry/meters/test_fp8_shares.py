"""Shares of the numbers that FP8 loses, from a run's steps to its files."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.telemetry.test_observer import meter_of
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import Ledger
from triaxis.engine.config.tree import Config
from triaxis.engine.kernels.fp8.recipes import E4M3, quantise
from triaxis.engine.linear.fp8_shares import Fp8Counts
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.step_result import StepResult
from triaxis.engine.telemetry.meters.fp8_shares import Fp8Shares
from triaxis.engine.telemetry.observer import TrainingObserver
from triaxis.engine.telemetry.outlets.console import Report
from triaxis.engine.telemetry.outlets.hub import Telemetry
from triaxis.engine.telemetry.outlets.metrics_log import MetricsLog
from triaxis.engine.telemetry.record.metrics import StepMetrics

RESULT = StepResult(3.0, 0.5, 100)


def counts_of(*linears: str) -> Fp8Counts:
    return Fp8Counts(linears, torch.device("cpu"), has_weights=True, is_replay=lambda: False)


def test_files_have_each_layer_and_charts_the_worst(make_metrics: Callable[..., StepMetrics]) -> None:
    counts = counts_of("layers.0.mlp.down", "layers.1.mlp.down")
    shares = Fp8Shares(counts, Axis("world", [0], 0, None, Ledger()), interval=1)
    shares.before_step()
    counts.end().copy_(torch.tensor([[[8, 2, 0], [8, 4, 1], [0, 0, 0]], [[8, 1, 0], [0, 0, 0], [0, 0, 0]]]))
    counts.is_open = True
    shares.after_update()
    metrics = make_metrics(measured=[shares.read(0, RESULT)])
    assert json.loads(json.dumps(metrics.to_record()))["fp8"] == {
        "layers.0.mlp.down": {
            "input": {"underflow": 0.25, "overflow": 0.0},
            "gradient": {"underflow": 0.5, "overflow": 0.125},
        },
        "layers.1.mlp.down": {"input": {"underflow": 0.125, "overflow": 0.0}},
    }
    assert {name: value for one in metrics.measured for name, value in one.charts.items()} == {
        "health/fp8/input_underflow": 0.25,
        "health/fp8/input_overflow": 0.0,
        "health/fp8/gradient_underflow": 0.5,
        "health/fp8/gradient_overflow": 0.125,
        "health/fp8/layers.0.mlp.down/input_underflow": 0.25,
        "health/fp8/layers.0.mlp.down/input_overflow": 0.0,
        "health/fp8/layers.0.mlp.down/gradient_underflow": 0.5,
        "health/fp8/layers.0.mlp.down/gradient_overflow": 0.125,
        "health/fp8/layers.1.mlp.down/input_underflow": 0.125,
        "health/fp8/layers.1.mlp.down/input_overflow": 0.0,
    }
    assert "fp8" not in make_metrics().to_record()


@pytest.mark.parametrize("goes_back", [False, True])
def test_every_third_step_is_measured_and_a_rollback_drops_what_was_not_read(goes_back: bool) -> None:
    counts = counts_of("layers.0.mlp.up", "layers.0.mlp.down")
    shares = Fp8Shares(counts, Axis("world", [0], 0, None, Ledger()), interval=3)
    shares.begin(1)
    x = torch.tensor([[1.0, 1e-9, 0.0, -1.0]])
    rounded = quantise(x, E4M3, None, has_powers=False, largest=None)
    for step in range(1, 6):
        shares.before_step()
        assert counts.is_open == (step in (2, 5))
        if counts.is_open:
            counts.add("layers.0.mlp.down", "input", x, rounded)
        shares.after_update()
        assert not counts.is_open
    if goes_back:
        shares.begin(2)
        assert shares.read(2, RESULT) is None and shares.read(5, RESULT) is None
        return
    assert shares.read(1, RESULT) is None
    expected = {"layers.0.mlp.up": {}, "layers.0.mlp.down": {"input": {"underflow": 1 / 3, "overflow": 0.0}}}
    for step in (2, 5):
        measured = shares.read(step, RESULT)
        assert measured is not None and measured.fields == {"fp8": expected}
    assert shares.read(2, RESULT) is None, "it is read once"


def test_the_observer_writes_the_shares_of_measured_steps(make_config: Callable[..., Config], tmp_path: Path) -> None:
    config, log = make_config(parallel={"dp": 1}), MetricsLog(tmp_path / "metrics.jsonl")
    report = Report(2, 10, terminal=io.StringIO(), log=None, show_mfu=False)
    counts = counts_of("layers.0.mlp.down")
    shares = Fp8Shares(counts, Axis("world", [0], 0, None, Ledger()), interval=2)
    observer = TrainingObserver(Telemetry(report, None, [log]), meter_of(config), torch.device("cpu"), meters=[shares])
    observer.begin(0)
    x = torch.tensor([[1.0, 1e-9]])
    for step in range(2):
        observer.enter(StepPart.FORWARD_BACKWARD)
        if counts.is_open:
            counts.add("layers.0.mlp.down", "weight", x, quantise(x, E4M3, None, has_powers=False, largest=None))
        observer.enter(StepPart.OPTIMIZER)
        observer.end_step()
        observer.on_step(step, RESULT, lr=0.1)
    observer.telemetry.close()
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert "fp8" not in first
    assert second["fp8"] == {"layers.0.mlp.down": {"weight": {"underflow": 0.5, "overflow": 0.0}}}
