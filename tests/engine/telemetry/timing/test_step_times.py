"""The time of real steps, on ranks that talk: it sums to the step, the bubble is the schedule's, a slow rank has a name.

sleeping stages    tiny tensors through the real executor, chunks that sleep: durations are known, cores are not needed
a GPT              tp 2 x pp 2 x vpp 2 x dp 2 on gloo: sums, the ledger, the timeline
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.cases import Case
from tests.parity.test_step_properties import build_rank
from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.ledger import Event
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.schema.telemetry import TelemetryConfig
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.linear.weight_grads import DeferredGrad, WeightGradQueue
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Action, Kind, Placement, Schedule
from triaxis.engine.pipeline.executor import Executor
from triaxis.engine.pipeline.lowering import lower
from triaxis.engine.pipeline.simulate import Costs, simulate
from triaxis.engine.pipeline.simulate import SimulatedTimeline as Timing
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.step_result import PendingResult
from triaxis.engine.telemetry.timing.clock_offsets import NUM_ROUNDS, measure_offset
from triaxis.engine.telemetry.timing.clocks import HostClock
from triaxis.engine.telemetry.timing.marks import TimeMarks
from triaxis.engine.telemetry.timing.slow_ranks import SlowRanks
from triaxis.engine.telemetry.timing.step_times import PURPOSE, StepTimes
from triaxis.engine.telemetry.timing.time_split import TimeSplit
from triaxis.engine.telemetry.timing.timeline import RowIdentity, Timeline, merge

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
EVERY_STEP = TelemetryConfig(log_interval=1)
NUM_STEPS = 5
"""The first warms up, the last only shows the one before it: 2, 3 and 4 are measured, each for itself."""


class Sleeping(torch.autograd.Function):
    """The identity, which takes the same time forward, for the gradient of its input, and for that of weights."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float, queue: WeightGradQueue) -> torch.Tensor:
        ctx.seconds, ctx.queue = seconds, queue
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        seconds = ctx.seconds
        time.sleep(seconds)
        if ctx.queue.deferring:
            ctx.queue.defer(DeferredGrad(grads[0], Pending, grads[0], lambda part, other: time.sleep(seconds)))
        else:
            time.sleep(seconds)
        return grads[0], None, None


@dataclass(frozen=True)
class Sleepers:
    """Ranks that sleep instead of computing."""

    sizes: ParallelSizes
    num_microbatches: int
    forward_seconds: tuple[float, ...]
    """Of a stage of each rank; a backward takes twice as long."""
    schedule: str = "1f1b"

    def of_step(self) -> Schedule:
        return schedules.build(self.schedule, self.sizes.pp, self.sizes.vpp, self.num_microbatches)


def sleep_through_steps(rank: int, sleepers: Sleepers) -> list[TimeSplit]:
    """The splits that the logging rank hears of; the first and the last step do not sleep."""
    marks = TimeMarks(HostClock())
    topology = Topology(RankGrid(sleepers.sizes), rank, CPU).observed([marks])
    program = lower(sleepers.of_step())
    placement = program.schedule.placement
    queues = [WeightGradQueue() for _ in range(placement.vpp)]
    executor = Executor(topology, queues, (1, 1, 4), torch.float64, [marks.instruction])
    times = StepTimes(EVERY_STEP, topology, program.schedule, marks, num_steps=NUM_STEPS)
    times.begin(0)
    weight = torch.ones(1, 1, 4, dtype=torch.float64, requires_grad=True)
    seconds = 0.0

    def chunk(number: int, x: torch.Tensor | None, microbatch: Any) -> torch.Tensor:
        out = Sleeping.apply(weight if x is None else x, seconds, queues[number])
        return out.sum() if placement.stage_of(topology.coordinates.pp, number) == placement.num_stages - 1 else out

    splits = []
    for step in range(1, NUM_STEPS + 1):
        seconds = sleepers.forward_seconds[rank] if step not in (1, NUM_STEPS) else 0.0
        times.enter(StepPart.DATA)
        times.enter(StepPart.FORWARD_BACKWARD)
        executor.run(program, range(sleepers.num_microbatches), chunk, output_grad=torch.ones(()))
        times.enter(StepPart.OPTIMIZER)
        topology.axis("world").all_reduce(torch.zeros(3), "step").wait()
        times.end_step()
        split = times.on_step(step)
        splits += [] if split is None else [split]
    times.finish()
    return splits


@pytest.mark.slow  # a busy machine wakes sleepers late
def test_the_bubble_of_sleeping_stages_is_that_of_the_event_timed_schedule() -> None:
    """Four stages, one slower than the others; 2 points of the step, best of 3."""
    forward = (0.05, 0.05, 0.08, 0.05)
    splits, *others = run_ranks(sleep_through_steps, 4, Sleepers(ParallelSizes(pp=4), 4, forward))
    assert others == [[], [], []] and [(split.first_step, split.last_step) for split in splits] == [
        (2, 2),
        (3, 3),
        (4, 4),
    ]
    ideal = simulate(schedules.build("1f1b", 4, 1, 4), Costs(forward, [2 * seconds for seconds in forward], (0.0,) * 4))

    def largest_error(split: TimeSplit) -> float:
        """Of all ranks and of their mean, measured and simulated with measured durations, as parts of the step."""
        errors = []
        for rank, parts in enumerate(split.ranks):
            step = sum(parts.values())
            errors.append(parts["bubble"] / step - ideal.bubble_fraction(rank))
            errors.append(split.schedule_bubbles[rank] / step - ideal.bubble_fraction(rank))
        errors.append((split.seconds["bubble"] - split.schedule_bubble) / split.step_seconds)
        return max(map(abs, errors))

    assert ideal.bubble_fraction(0) > 0.5 and ideal.bubble_fraction(2) < 0.3, "ranks wait differently long"
    assert min(map(largest_error, splits)) <= 0.02, list(map(largest_error, splits))


LAYER_SECONDS = 0.12
"""Forward of a rank's layers, over one stage or two."""

NAMES = {"1f1b": ParallelSizes(pp=4), "zb_h1": ParallelSizes(pp=4), "zbv": ParallelSizes(pp=4, vpp=2, is_v=True)}


@pytest.mark.slow  # a busy machine wakes sleepers late
def test_zero_bubble_schedules_wait_as_long_as_the_simulator_says() -> None:
    """Four ranks, eight microbatches: within half a point of the step, best of 3. ZBV is faster than ZB-H1 and that than 1F1B."""
    measured = {}
    for name, sizes in NAMES.items():
        sleepers = Sleepers(sizes, 8, (LAYER_SECONDS / sizes.vpp,) * 4, name)
        timeline = simulate(sleepers.of_step(), Costs.uniform(4 * sizes.vpp, *[LAYER_SECONDS / sizes.vpp] * 3))
        splits, *_ = run_ranks(sleep_through_steps, 4, sleepers, timeout_seconds=120)

        def error(split: TimeSplit, timeline: Timing = timeline) -> float:
            """Of the rank that is farthest off."""
            shares = [parts["bubble"] / sum(parts.values()) for parts in split.ranks]
            return max(abs(share - timeline.bubble_fraction(rank)) for rank, share in enumerate(shares))

        best = min(splits, key=error)
        assert error(best) <= 0.005, (name, [error(split) for split in splits])
        measured[name] = min(split.step_seconds for split in splits)
    # No ratio of steps: each action costs the host time too, the more the busier it is, and ZBV has twice as many.
    assert measured["zbv"] < measured["zb_h1"] < measured["1f1b"], measured


@pytest.mark.slow
def test_a_rank_that_sleeps_longer_is_named() -> None:
    """dp 2 x pp 2: rank 2 (stage 1) takes half as long again as rank 3, which waits for nobody longer."""
    sleepers = Sleepers(ParallelSizes(pp=2, dp=2), 2, (0.04, 0.04, 0.06, 0.04))
    splits, *_ = run_ranks(sleep_through_steps, 4, sleepers)
    grid = RankGrid(ParallelSizes(tp=1, pp=2, dp=2))
    ranks = SlowRanks([grid.coordinates(rank).pp for rank in range(4)], ["a", "a", "b", "b"])
    named = [slow for split in splits for slow in ranks.report(split.usual_compute)]
    assert [(slow.rank, slow.host) for slow in named] == [(2, "b")]


# A GPT -------------------------------------------------------------------------------------------------------------------

GPT = Case("qwen", tp=2, pp=2, vpp=2, dp=2, sequence_parallel=True, num_layers=4)
TRACED = range(3, 5)


class RememberingClock(HostClock):
    """A host's clock that keeps its last reading: a second reading would be later by what a busy machine does in between."""

    def mark(self) -> float:
        self.last = super().mark()
        return self.last


@dataclass
class Measured:
    """What one rank saw: seconds between the marks that end its steps, the splits that it heard of, its calls for telemetry."""

    step_seconds: list[float]
    splits: list[TimeSplit]
    calls: list[Event]
    actions: list[str]
    clock_error: float
    clock_bound: float


def train_a_gpt(rank: int, run: str) -> Measured:
    """Steps in the order of `triaxis.engine.train.train`: a step's numbers are read when the next one is posted."""
    clock = RememberingClock()
    marks = TimeMarks(clock)
    engine, batches = build_rank(rank, GPT, [marks])
    topology, world = engine.topology, engine.topology.axis("world")
    skew = 1000.0 * rank
    offset = measure_offset(world, CPU, clock=lambda: time.perf_counter() + skew)
    (first, *_) = world.all_gather(torch.tensor([offset.origin_seconds - skew], dtype=torch.float64), "test").wait()
    schedule = engine.schedule
    row = RowIdentity(rank, GPT.world_size, str(topology.coordinates), topology.coordinates.pp, schedule.placement)
    timeline = Timeline(TRACED, row, Path(run) / "timeline" / "attempt_00" / f"rank_{rank:05d}.json")
    times = StepTimes(EVERY_STEP, topology, schedule, marks, num_steps=NUM_STEPS, timeline=timeline)
    times.begin(0)
    unread: list[tuple[int, PendingResult]] = []
    ends, splits, calls = [clock.mark()], [], []

    def read(is_last: bool) -> None:
        done = unread if is_last else unread[:-1]
        for _, result in done:
            result.wait()
        times.end_step()
        ends.append(clock.last)
        for step, _ in done:
            known = len(topology.ledger.events)
            split = times.on_step(step)
            splits.extend([] if split is None else [split])
            calls.extend(event for event in topology.ledger.events[known:] if event.phase == "post")
        del unread[: len(done)]

    for step in range(1, NUM_STEPS + 1):
        times.enter(StepPart.DATA)
        microbatches = batches.next_step()
        times.enter(StepPart.FORWARD_BACKWARD)
        losses = engine.forward_backward(microbatches)
        times.enter(StepPart.OPTIMIZER)
        unread.append((step, engine.update(losses, 1e-3)))
        read(step == NUM_STEPS)
        times.enter(StepPart.CHECKPOINT)
    times.finish()
    times.close()
    batches.close()
    actions = [str(action) for action in schedule.actions[topology.coordinates.pp]]
    seconds = [stop - start for start, stop in pairwise(ends)]
    clock_error = abs(offset.origin_seconds - skew - float(first))
    return Measured(seconds, splits, calls, actions, clock_error, offset.error_seconds)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sequence[Measured]]:
    run = tmp_path_factory.mktemp("gpt")
    return run, run_ranks(train_a_gpt, GPT.world_size, str(run))


def test_the_parts_sum_to_the_step_on_every_rank(gpt: tuple[Path, Sequence[Measured]]) -> None:
    _, ranks = gpt
    splits = ranks[0].splits
    assert [(split.first_step, split.last_step) for split in splits] == [(2, 2), (3, 3), (4, 4)]
    assert all(rank.splits == [] for rank in ranks[1:])
    for split in splits:
        for rank, parts in enumerate(split.ranks):
            assert sum(parts.values()) == pytest.approx(ranks[rank].step_seconds[split.first_step - 1], rel=1e-6)
            assert min(parts.values()) >= 0.0
            for part in ("compute", "exposed_tp", "exposed_dp", "optimizer", "data"):
                assert parts[part] > 0.0, (rank, part)  # type: ignore[literal-required]
            assert parts["other"] < 0.5 * sum(parts.values())
        # A rank that a busy machine makes the last waits for no other stage in that step; some rank does.
        for part in ("bubble", "exposed_pp"):
            assert sum(parts[part] for parts in split.ranks) > 0.0, part  # type: ignore[literal-required]


def test_rows_travel_along_the_axes_before_a_line(gpt: tuple[Path, Sequence[Measured]]) -> None:
    """For steps 2, 3, 4 each: 13 spans, median compute; six numbers of the step, wait and duration of each of 16 actions."""
    _, ranks = gpt
    row, grid = 16 + 6 + 2 * 16, RankGrid(ParallelSizes(tp=2, pp=2, dp=2, vpp=2))
    for number, rank in enumerate(ranks):
        at = grid.coordinates(number)
        calls = [("all_gather", "tp", PURPOSE, row, 2)]
        calls += [("all_gather", "pp", PURPOSE, 2 * row, 2)] if at.tp == 0 else []
        calls += [("all_gather", "dp", PURPOSE, 4 * row, 2)] if at.tp == at.pp == 0 else []
        told = [(call.op, call.axis, call.purpose, call.numel, call.group_size) for call in rank.calls]
        # One is posted before the line and the others with it; after the last line none is posted.
        assert sorted(told) == sorted(calls * 3)


def test_a_row_of_the_timeline_holds_the_actions_of_its_rank_in_their_order(
    gpt: tuple[Path, Sequence[Measured]],
) -> None:
    run, ranks = gpt
    merged = merge(run)
    assert merged.num_ranks == 8 and not merged.missing
    content = json.loads(merged.path.read_text())
    slices = [event for event in content["traceEvents"] if event["ph"] == "X"]
    order = [each["tid"] for each in content["traceEvents"] if each["name"] == "thread_sort_index"]
    assert order == list(range(8)) and min(event["ts"] for event in slices) >= 0.0
    for number, rank in enumerate(ranks):
        mine = [event for event in slices if event["tid"] == number]
        steps = [event for event in mine if event["cat"] == "step"]
        assert [event["name"] for event in steps] == [f"step {step}" for step in TRACED]
        for step in steps:
            inside = [event for event in mine if is_inside(event, step)]
            actions = sorted((event for event in inside if event["cat"] == "action"), key=lambda event: event["ts"])
            assert [event["name"] for event in actions] == rank.actions
            parts = {event["name"] for event in inside if event["cat"] == "part"}
            assert parts == {"other", "checkpoint", "data", "forward_backward", "optimizer"}
            waits = {event["name"] for event in inside if event["cat"] == "wait"}
            assert waits >= {"wait tp", "wait dp", "wait world"}
        # A row is read as nested slices: whatever overlaps is inside.
        ordered = sorted(mine, key=lambda event: (event["ts"], -event["dur"]))
        check_nesting(ordered)


def test_the_rows_have_one_axis_of_time(gpt: tuple[Path, Sequence[Measured]]) -> None:
    """A forward ends after the forward of the stage before it, whose output it needs, by clocks that agree as well as promised."""
    run, _ = gpt
    content = json.loads(merge(run).path.read_text())
    grid, placement = RankGrid(ParallelSizes(tp=2, pp=2, dp=2, vpp=2)), Placement(2, 2)
    steps = {(event["tid"], event["name"]): event for event in content["traceEvents"] if event.get("cat") == "step"}
    ends: dict[tuple[str, int, int, int, int], float] = {}
    for event in content["traceEvents"]:
        if event.get("cat") != "action" or Action.parse(event["name"]).kind is not Kind.F:
            continue
        rank, action = grid.coordinates(event["tid"]), Action.parse(event["name"])
        step = next(name for (tid, name), outer in steps.items() if tid == event["tid"] and is_inside(event, outer))
        stage = placement.stage_of(rank.pp, action.chunk)
        ends[step, rank.dp, rank.tp, action.microbatch, stage] = event["ts"] + event["dur"]
    error = 2e6 * content["otherData"]["clock_error_seconds"]
    later = [key for key in ends if key[-1] > 0]
    assert len(later) == len(TRACED) * 4 * 4 * 3, "steps x pipelines x microbatches x stages after the first"
    for key in later:
        assert ends[key] >= ends[(*key[:-1], key[-1] - 1)] - error, key


def is_inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e-6)


def check_nesting(ordered: Sequence[dict[str, Any]]) -> None:
    open_slices: list[dict[str, Any]] = []
    for event in ordered:
        while open_slices and open_slices[-1]["ts"] + open_slices[-1]["dur"] <= event["ts"] + 1e-6:
            open_slices.pop()
        assert not open_slices or is_inside(event, open_slices[-1]), (event, open_slices[-1])
        open_slices.append(event)


def test_clocks_that_differ_are_found_within_what_is_promised(gpt: tuple[Path, Sequence[Measured]]) -> None:
    """Each rank's clock was set forward by 1000 s x rank; the clocks of one machine do not differ otherwise."""
    _, ranks = gpt
    assert ranks[0].clock_bound == 0.0
    for rank in ranks[1:]:
        assert rank.clock_error <= rank.clock_bound < 0.5
    assert NUM_ROUNDS > 1
