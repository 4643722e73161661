"""The load of experts on a run's page: what its heat maps show, and records that hold something else."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.report.test_report import HOSTILE, STEP, make_run, page_of
from triaxis.engine.step_result import StepResult
from triaxis.engine.telemetry.meters.expert_load import LoadMeter
from triaxis.engine.telemetry.outlets.metrics_log import MetricsLog
from triaxis.launch.report.experts import MOST_COLUMNS, MOST_EXPERTS, expert_load, heat_map
from triaxis.launch.report.record import read_run

EVEN, UNEVEN = (10, 10, 10, 10), (4, 16, 10, 10)


def with_experts(path: Path, loads: list[tuple[tuple[int, ...], ...]], layers: tuple[int, ...]) -> Path:
    """A run whose steps have these loads."""
    run = make_run(path)
    (run / "metrics.jsonl").unlink()
    metrics, meter = MetricsLog(run / "metrics.jsonl"), LoadMeter(layers, len(loads), 10)
    for step, each in enumerate(loads, start=1):
        metrics.record(replace(STEP, step=step, measured=[meter.read(step - 1, StepResult(3.0, 0.5, 100, load=each))]))
    metrics.close()
    return run


def test_the_page_shows_experts_and_steps(tmp_path: Path) -> None:
    page = page_of(with_experts(tmp_path / "moe", [(EVEN, UNEVEN)] * 20, (1, 7)))
    text = page.sections["experts"]
    assert "In step 20 the fullest expert has 1.60 times the mean load, in layer 7." in text
    assert "Rows of tokens dropped in all steps: 0." in text
    assert "Load of each expert, steps 11 to 20" in text, "the counts that were recorded last"
    assert "layer 7, expert 1: 1.60 of the mean" in text and "layer 7, expert 0: 0.40 of the mean" in text
    assert "layer 7, step 20: 1.60" in text and "layer 1, step 1: 1.00" in text


def test_a_page_without_experts_has_no_such_part(tmp_path: Path) -> None:
    assert "experts" not in page_of(make_run(tmp_path / "dense")).ids


def test_shades_are_those_of_the_ratio() -> None:
    drawn = heat_map("a map", ["layer 1"], [[0.0, 0.5, 1.0, 1.5, 9.0]], "expert", [], lambda *_: "", full=2.0)
    assert re.findall(r'class="(c\d)" fill-opacity="([\d.]+)"', drawn) == [
        *(("c0", "1"), ("c0", "0.5"), ("c1", "0"), ("c1", "0.5"), ("c1", "1"))
    ]


@pytest.mark.slow
def test_a_large_model_and_a_long_run_stay_small(tmp_path: Path) -> None:
    experts = 3 * MOST_EXPERTS
    counts = tuple(tuple(100 + (expert == 700) * 900 for expert in range(experts)) for _ in range(40))
    run = read_run(with_experts(tmp_path / "large", [counts] * (2 * MOST_COLUMNS + 1), tuple(range(40))))
    drawn = expert_load(run)
    assert len(drawn) < 400_000 and "Each column is the fullest of 3 neighbours." in drawn
    assert "Each column is the mean of 3 steps." in drawn
    (shade,) = re.findall(r'<path class="c1" fill-opacity="1" d="([^"]*)"', drawn.split("<h3>Fullest")[0])
    assert shade.count("M") == 40, "the one full expert of each layer is not lost among its neighbours"


@pytest.mark.parametrize(
    "experts",
    [
        {"layers": [HOSTILE], "load_max_over_mean": [1.5], "counts": [[1, 2]], "first_step": HOSTILE},
        {"layers": [1, 2], "load_max_over_mean": [1.5, "x"], "counts": [[1, 2], [1]]},
        {"layers": [1], "load_max_over_mean": [1.5], "counts": []},
        {"layers": [1], "load_max_over_mean": [1.5], "counts": [[0, 0]]},
        {"layers": 3, "load_max_over_mean": [1.5], "counts": [["x"]]},
        HOSTILE,
    ],
)
def test_records_that_hold_something_else(experts: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "odd")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(json.loads(line) | {"experts": experts}) + "\n" for line in lines)
    )
    assert page_of(run).ids
