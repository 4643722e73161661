"""Traces: which steps are in one, and that its ranges are the schedule's instructions inside the loop's parts."""

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.full_disk import room_for
from tests.harness import run_ranks
from tests.parity.cases import Case
from tests.parity.test_step_properties import build_rank
from triaxis.engine.config.schema.telemetry import ProfileConfig
from triaxis.engine.pipeline.lowering import Post
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.telemetry.trace.layer_ranges import LAYER
from triaxis.engine.telemetry.trace.profile import POST, StepProfiler

PARTS = (StepPart.DATA, StepPart.FORWARD_BACKWARD, StepPart.OPTIMIZER)
CPU = torch.device("cpu")

Range = tuple[str, float, float]


def ranges_of(path: Path) -> list[Range]:
    """(name, start, end) of the ranges that we named, in the order of their starts; gloo names its own."""
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = [event for event in events if event.get("cat") == "user_annotation"]
    found = [(event["name"], event["ts"], event["ts"] + event["dur"]) for event in named]
    return sorted((each for each in found if not each[0].startswith("gloo:")), key=lambda each: each[1])


def operators_of(path: Path) -> list[Range]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [(each["name"], each["ts"], each["ts"] + each["dur"]) for each in events if each.get("cat") == "cpu_op"]


@pytest.mark.parametrize(
    ("steps_made", "traced"),
    [(0, [3, 4]), (3, [4]), (4, [])],
    ids=["a new run", "resumed in the middle", "resumed after"],
)
def test_the_named_steps_are_traced_and_no_other(tmp_path: Path, steps_made: int, traced: list[int]) -> None:
    path = tmp_path / "profile" / "trace.json.gz"
    profiler = StepProfiler(ProfileConfig(start=3, steps=2), path, CPU)
    written: list[Path] = []
    profiler.on_written = written.append
    profiler.begin(steps_made)
    for step in range(steps_made + 1, 7):
        for part in PARTS:
            profiler.enter(part)
            torch.ones(step).add_(step)
    profiler.close()
    assert written == ([path] if traced else []) and path.exists() == bool(traced)
    if traced:
        assert [name for name, _, _ in ranges_of(path)] == list(PARTS) * len(traced)
        assert Counter(name for name, _, _ in operators_of(path))["aten::add_"] == len(PARTS) * len(traced)


def test_a_run_that_ends_early_leaves_what_it_traced(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    profiler = StepProfiler(ProfileConfig(start=1, steps=100), path, CPU)
    profiler.enter(StepPart.DATA)
    profiler.close()
    profiler.close()
    assert [name for name, _, _ in ranges_of(path)] == ["data"]


def test_a_trace_without_room_is_a_line_and_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = StepProfiler(ProfileConfig(start=1, steps=1), tmp_path / "trace.json.gz", CPU)
    written: list[Path] = []
    profiler.on_written = written.append
    profiler.enter(StepPart.DATA)
    with room_for(0):
        profiler.close()
    assert "the trace could not be written, training goes on" in capsys.readouterr().err and not written


def trace_a_step(rank: int, case: Case, folder: str) -> list[str]:
    """Trace the second of three steps; the names of the instructions of this rank's program."""
    engine, batches = build_rank(rank, case)
    profiler = StepProfiler(ProfileConfig(start=2, steps=1), Path(folder) / f"{rank}.json.gz", CPU)
    engine.executor.observers = (profiler.instruction,)
    for _ in range(3):
        profiler.enter(StepPart.DATA)
        microbatches = batches.next_step()
        profiler.enter(StepPart.FORWARD_BACKWARD)
        engine.train_step(microbatches, 1e-3)
    profiler.close()
    batches.close()
    row = engine.train_programs.early.instructions[engine.topology.coordinates.pp]
    return [POST if isinstance(each, Post) else str(each) for each in row]


@pytest.mark.distributed
def test_ranges_are_the_instructions_of_the_rank_in_their_order(tmp_path: Path) -> None:
    case = Case("gpt", pp=2, vpp=2, global_batch_size=4)
    for rank, expected in enumerate(run_ranks(trace_a_step, 2, case, str(tmp_path))):
        path = tmp_path / f"{rank}.json.gz"
        data, part, *instructions = (each for each in ranges_of(path) if not LAYER.fullmatch(each[0]))
        assert (data[0], part[0]) == ("data", "forward_backward")
        assert [name for name, _, _ in instructions] == expected
        assert "0F0" in expected and "1B3" in expected
        for (_, start, end), (_, after, _) in pairwise(instructions):
            assert part[1] <= start <= end <= after, "one after the other, inside the part"
        # Work is inside the range that caused it.
        backward = next(each for each in instructions if each[0] == "1B0")
        assert any(name == "aten::mm" and backward[1] <= start <= backward[2] for name, start, _ in operators_of(path))


@pytest.mark.distributed
@pytest.mark.parametrize("recompute", [None, ("full", "uniform", 1)])
def test_layers_have_ranges_in_their_order(tmp_path: Path, recompute: tuple[str, str, int] | None) -> None:
    """In a forward from the first on, in a backward from the last; a forward that is recomputed comes before its backward."""
    case = Case("gpt", num_layers=3, global_batch_size=2, **({} if recompute is None else {"recompute": recompute}))
    run_ranks(trace_a_step, 1, case, str(tmp_path))
    ranges = ranges_of(tmp_path / "0.json.gz")
    layers = [each for each in ranges if LAYER.fullmatch(each[0])]
    for _, start, end in (each for each in ranges if each[0] in ("0F0", "0F1")):
        assert [name for name, begun, _ in layers if start <= begun <= end] == [f"layers.{n}" for n in range(3)]
    times = 1 if recompute is None else 2
    for _, start, end in (each for each in ranges if each[0] in ("0B0", "0B1")):
        found = [each for each in layers if start <= each[1] <= end]
        assert [name for name, _, _ in found] == [f"layers.{n}" for n in (2, 1, 0) for _ in range(times)]
        assert all(after <= begun for (_, _, after), (_, begun, _) in pairwise(found))
    assert len(layers) == 2 * 3 * (1 + times)
    assert len(torch.nn.modules.module._global_forward_hooks) == 0
