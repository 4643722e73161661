"""The load of experts as numbers: exact words of the line, what files get, and how often they get the counts."""

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.telemetry.test_observer import meter_of
from triaxis.engine.comm.agreement import NO_FLAGS
from triaxis.engine.config.tree import Config
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.step_result import SKIPS, PendingResult, StepResult, explain
from triaxis.engine.telemetry.meters.expert_load import MOST_COUNTS, LoadMeter
from triaxis.engine.telemetry.observer import TrainingObserver
from triaxis.engine.telemetry.outlets.console import Report
from triaxis.engine.telemetry.outlets.hub import Telemetry
from triaxis.engine.telemetry.outlets.metrics_log import MetricsLog
from triaxis.engine.telemetry.record.expert_load import entropy, max_over_mean
from triaxis.engine.telemetry.record.metrics import StepMetrics

EVEN, UNEVEN, ONE = (25, 25, 25, 25), (25, 25, 21, 29), (0, 100, 0, 0)


def test_ratios_of_a_load() -> None:
    assert [max_over_mean(counts) for counts in (EVEN, UNEVEN, ONE)] == [1.0, 1.16, 4.0]
    assert entropy(EVEN) == pytest.approx(1.0) and entropy(ONE) == 0.0
    assert entropy((50, 50, 0, 0)) == pytest.approx(math.log(2) / math.log(4))
    assert math.isnan(max_over_mean((0, 0))) and math.isnan(entropy((0, 0)))


def test_the_line_names_the_worst_layer(make_metrics: Callable[..., StepMetrics]) -> None:
    file = io.StringIO()
    report = Report(30, 10, terminal=file, log=None, show_mfu=False)
    meter = LoadMeter((1, 7, 8), num_steps=30, log_interval=10)
    for step in range(1, 11):
        load = (EVEN, ONE, EVEN) if step < 10 else (EVEN, UNEVEN, UNEVEN)
        report.step(make_metrics(step=step, measured=[meter.read(step - 1, StepResult(3.0, 0.5, 100, load=load))]))
    lines = file.getvalue().splitlines()
    assert lines[2] == "         experts load max/mean 4.00 (layer 7), dropped 0", "the first step has a line too"
    assert lines[-1] == "         experts load max/mean 1.16 (layer 7), dropped 0"


def test_charts_have_each_layer() -> None:
    meter = LoadMeter((1, 7), num_steps=30, log_interval=10)
    experts = meter.read(0, StepResult(3.0, 0.5, 100, load=(EVEN, ONE), dropped=3))
    assert experts is not None and dict(experts.charts) == {
        "health/experts/load_max_over_mean": 4.0,
        "health/experts/dropped": 3,
        "health/experts/layer_1/load_max_over_mean": 1.0,
        "health/experts/layer_1/entropy": pytest.approx(1.0),
        "health/experts/layer_7/load_max_over_mean": 4.0,
        "health/experts/layer_7/entropy": 0.0,
    }


def test_counts_add_up_and_are_rare_in_long_runs() -> None:
    short, long = LoadMeter((0,), num_steps=25, log_interval=10), LoadMeter((0,), num_steps=1_000_003, log_interval=7)
    records = [short.read(step, StepResult(3.0, 0.5, 100, load=(UNEVEN,))).fields["experts"] for step in range(25)]
    since = [each for each in records if "counts" in each]
    assert [(each["first_step"], each["last_step"]) for each in since] == [(1, 10), (11, 20), (21, 25)]
    assert [each["counts"][0] for each in since] == [[n * count for count in UNEVEN] for n in (10, 10, 5)]
    due = [step for step in range(1, long.num_steps + 1) if long.has_counts(step)]
    assert MOST_COUNTS / 2 < len(due) <= MOST_COUNTS + 1 and due[-1] == long.num_steps
    assert all(step % long.log_interval == 0 for step in due[:-1])


def test_a_rollback_forgets_what_was_counted() -> None:
    meter = LoadMeter((0,), num_steps=20, log_interval=10)
    for step in range(1, 9):
        meter.read(step - 1, StepResult(3.0, 0.5, 100, load=(ONE,)))
    meter.begin(4)
    last = [meter.read(step, StepResult(3.0, 0.5, 100, load=(EVEN,))) for step in range(4, 10)][-1].fields["experts"]
    assert (last["first_step"], last["counts"]) == (5, [[6 * count for count in EVEN]])


def test_a_step_reads_its_load_with_its_other_numbers() -> None:
    """The counts are part of the one vector that is copied to the host; rows without room are `dropped`."""
    numbers = {"loss": 2.5, "grad_norm": 0.5, "num_tokens": 100, "loss_sum": 250.0, "square_sum": 0.25, "dropped": 3}
    others = {"skip": SKIPS.index("diverged"), "flags": NO_FLAGS.values(), "ahead": (2.75,), "load": (EVEN, UNEVEN)}
    result = PendingResult({name: torch.tensor(each) for name, each in (numbers | others).items()}).read()
    assert (result.loss, result.grad_norm, result.num_tokens, result.ahead) == (2.5, 0.5, 100, (2.75,))
    assert result.load == (EVEN, UNEVEN) and result.dropped == 3 and "no room" in result.why
    assert "model.moe.row_headroom" in explain(result) and "optimizer.lr" not in explain(result)


def test_the_observer_writes_the_load_of_each_step(make_config: Callable[..., Config], tmp_path: Path) -> None:
    config, log = make_config(parallel={"dp": 1}), MetricsLog(tmp_path / "metrics.jsonl")
    report = Report(2, 10, terminal=io.StringIO(), log=None, show_mfu=False)
    experts = LoadMeter((3,), num_steps=2, log_interval=10)
    observer = TrainingObserver(Telemetry(report, None, [log]), meter_of(config), torch.device("cpu"), meters=[experts])
    for step, load in enumerate((EVEN, UNEVEN)):
        observer.enter(StepPart.DATA)
        observer.end_step()
        observer.on_step(step, StepResult(3.0, 0.5, 100, load=(load,)), lr=0.1)
    observer.telemetry.close()
    first, second = (json.loads(line)["experts"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first == {"layers": [3], "load_max_over_mean": [1.0], "entropy": [1.0], "dropped": 0}
    assert second["load_max_over_mean"] == [1.16]
    assert (second["first_step"], second["last_step"]) == (1, 2)
    assert second["counts"] == [[a + b for a, b in zip(EVEN, UNEVEN, strict=True)]]
