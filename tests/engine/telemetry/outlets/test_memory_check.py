"""Measured memory beside the predicted one: once, of the rank that has held the most, on all ranks alike."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.harness import run_ranks
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import batch_plan
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.step_result import StepResult
from triaxis.engine.telemetry.observer import TrainingObserver
from triaxis.engine.telemetry.outlets.console import Report
from triaxis.engine.telemetry.outlets.hub import Telemetry
from triaxis.engine.telemetry.outlets.memory_check import AFTER_STEPS, Held, MemoryCheck, held_on_gpu
from triaxis.engine.telemetry.record.events import EventLog
from triaxis.engine.telemetry.record.metrics import Meter

GB = 10**9
CPU = torch.device("cpu")
PREDICTED = [(50 * GB, GB), (40 * GB, 2 * GB)]


def compared(rank: int) -> list[dict[str, int] | None]:
    topology = Topology(RankGrid(ParallelSizes(pp=2)), rank, CPU)
    held = Held(allocated=(48 + rank) * GB, reserved=(52 + rank) * GB, in_use=60 * GB, capacity=85 * GB)
    check = MemoryCheck(topology, PREDICTED, lambda: held)
    return [check.on_step() for _ in range(4)]


@pytest.mark.distributed
def test_every_rank_gets_the_numbers_of_the_fullest_once() -> None:
    held = Held(49 * GB, 53 * GB, 60 * GB, 85 * GB)._asdict()
    predicted = {"predicted_tensors": 40 * GB, "predicted_communicators": 2 * GB}
    fullest = {"after_steps": AFTER_STEPS, "rank": 1, "pp": 1, **held, **predicted}
    for found in run_ranks(compared, 2):
        assert found == [None, fullest, None, None]


def test_the_log_has_one_line_and_one_event(make_config: Callable[..., Config], tmp_path: Path) -> None:
    screen, config, path = io.StringIO(), make_config(), tmp_path / "events.jsonl"
    report = Report(30, 10, terminal=screen, log=None, show_mfu=False)
    topology = Topology(RankGrid(ParallelSizes()), 0, CPU)
    check = MemoryCheck(topology, PREDICTED, lambda: Held(48 * GB, 52 * GB, 60 * GB, 85 * GB))
    plan = batch_plan(config, 1)
    meter = Meter(config, plan, layers_per_chunk=[2], world_size=1, device_name="cpu", attempt=0)
    observer = TrainingObserver(Telemetry(report, EventLog(path, 0)), meter, CPU, memory=check)
    for step in range(4):
        observer.enter(StepPart.DATA)
        observer.end_step()
        observer.on_step(step, StepResult(loss=3.0, grad_norm=0.5, num_tokens=100), lr=0.1)
    (line,) = [line for line in screen.getvalue().splitlines() if line.startswith("memory")]
    assert "rank 0 (pp 0) has held at most 48.0 GB of tensors (50.0 GB predicted)" in line
    assert "reserved 52.0 GB; outside it, 8.0 GB" in line and "1.0 GB predicted for communicators" in line
    (event,) = map(json.loads, path.read_text().splitlines())
    assert event["kind"] == "memory" and event["step"] == AFTER_STEPS and event["rank"] == 0
    assert event["predicted_tensors"] == 50 * GB and event["message"] == line


@pytest.mark.gpu
def test_a_gpu_counts_tensors_and_what_is_in_use() -> None:
    device = torch.device("cuda", 0)
    kept = torch.ones(64, 1 << 20, device=device)
    held = held_on_gpu(device)
    assert kept.nbytes <= held.allocated <= held.reserved <= held.in_use <= held.capacity
