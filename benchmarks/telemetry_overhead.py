"""Cost of measuring the time of a step: the same steps with and without it, side by side, in one run.

    round 1   measured, plain, control       ratio = measured / plain, wall seconds and CPU seconds of all ranks
    round 2   plain, control, measured       the control is plain as well: its ratio says what the machine lets one see
    result    median of the ratios, with the interval that holds it with 95 % probability

Rounds are made until the time is up, so that a run takes about a minute; an interval needs six of them.

Machines are rarely quiet enough to see half a percent in a ratio, so the cost is counted too: marks in a step, times what a mark
costs to make and to add up (CPU seconds, in a loop), and on the first rank what putting the ranks' numbers together costs per step
(a replay of the pipelines), over the CPU seconds of a plain step of one rank. What is CPU time here is less than the time of a step
that waits, so the share of the time is smaller. The exchange before a line is in the ratios only.

    OMP_NUM_THREADS=1 python -m benchmarks.telemetry_overhead configs/gpt_tiny.yaml parallel.tp=1 parallel.pp=1 parallel.vpp=1 \\
        parallel.dp=1 parallel.sequence_parallel=false
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.telemetry_overhead configs/gpt_tiny.yaml parallel.pp=1 \\
        parallel.vpp=1 parallel.dp=1 train.global_batch_size=8
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine_overhead import Interval, median_interval
from benchmarks.rank_steps import LEARNING_RATE, Stepping, parser_of, ready, timed
from triaxis.engine.comm.ledger import Ledger
from triaxis.engine.config.telemetry import TelemetryConfig
from triaxis.engine.layout.rank_grid import RankGrid
from triaxis.engine.pipeline.actions import Action, Kind, Schedule
from triaxis.engine.run.garbage import GarbageCollection
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.telemetry.timing.bubble import Attribution, num_actions
from triaxis.engine.telemetry.timing.clocks import HostClock
from triaxis.engine.telemetry.timing.marks import TimeMarks
from triaxis.engine.telemetry.timing.step_times import StepTimes
from triaxis.engine.telemetry.timing.time_split import STEP_NUMBERS, USUAL, StepTally
from triaxis.launch.start.process.ending import run_rank

WARM_UP_ROUNDS = 2
MIN_ROUNDS = 6
"""Of fewer ratios not even the smallest and the largest hold the true median with 95 % probability."""
NEVER = 10**9


class CountingClock(HostClock):
    """The host's clock, which knows how often it was asked for a mark."""

    def __init__(self) -> None:
        self.num_marks = 0

    def mark(self) -> float:
        self.num_marks += 1
        return super().mark()


@dataclass(frozen=True, slots=True)
class Result:
    """Ratios are measured / plain; a plain step's seconds are wall time, and CPU time of one rank (the mean of all)."""

    wall_ratio: Interval
    cpu_ratio: Interval
    control_wall_ratio: Interval
    control_cpu_ratio: Interval
    plain_seconds: float
    plain_cpu_seconds: float
    num_rounds: int
    marks_per_step: float
    seconds_per_mark: float
    attribution_seconds: float

    @property
    def counted(self) -> float:
        """CPU seconds of a step's marks, and of its share in the attribution, over those of a plain step: on the first rank."""
        return (self.marks_per_step * self.seconds_per_mark + self.attribution_seconds) / self.plain_cpu_seconds


def compare(stepping: Stepping, most_rounds: int, seconds: float, log_interval: int) -> Result:
    """Make rounds of three steps, for so many seconds or so many rounds; every rank calls it."""
    engine, batches = stepping.engine, stepping.batches
    topology, clock = engine.topology, CountingClock()
    marks = TimeMarks(clock)
    times = StepTimes(TelemetryConfig(log_interval=log_interval), topology, engine.schedule, marks, num_steps=NEVER)
    times.begin(0)
    steps_made = 0

    def plain_step() -> None:
        microbatches = batches.next_step()
        engine.update(engine.forward_backward(microbatches), LEARNING_RATE).wait()

    def measured_step() -> None:
        nonlocal steps_made
        # One engine makes both kinds of steps.
        topology.ledger._observers, engine.executor.observers = (marks,), (marks.instruction,)
        times.enter(StepPart.DATA)
        microbatches = batches.next_step()
        times.enter(StepPart.FORWARD_BACKWARD)
        losses = engine.forward_backward(microbatches)
        times.enter(StepPart.OPTIMIZER)
        engine.update(losses, LEARNING_RATE).wait()
        times.end_step()
        steps_made += 1
        times.on_step(steps_made)
        topology.ledger._observers, engine.executor.observers = (), ()

    sides = (measured_step, plain_step, plain_step)
    wall: list[list[float]] = [[], [], []]
    cpu: list[list[float]] = [[], [], []]
    world = topology.axis("world")
    first_marks, began, number, late_ranks = 0, time.perf_counter(), -WARM_UP_ROUNDS, 0.0
    while number < min(most_rounds, MIN_ROUNDS) or (number < most_rounds and not late_ranks):
        if number == 0:
            first_marks = clock.num_marks
        for place in range(len(sides)):
            side = (place + number) % len(sides)
            # Together, so that no rank's step begins with the wait for another's last one.
            world.barrier(topology.device, "benchmark")
            step = timed(sides[side])
            (all_cpu_seconds,) = world.sum_values([step.process], topology.device, "benchmark")
            if number >= 0:
                wall[side].append(step.wall)
                cpu[side].append(all_cpu_seconds)
        number += 1
        (late_ranks,) = world.sum_values([float(time.perf_counter() - began > seconds)], topology.device, "benchmark")
    marks_per_step = (clock.num_marks - first_marks) / number
    times.finish()

    def ratio(seconds: list[list[float]], side: int) -> Interval:
        return median_interval([one / plain for one, plain in zip(seconds[side], seconds[1], strict=True)])

    return Result(
        wall_ratio=ratio(wall, 0),
        cpu_ratio=ratio(cpu, 0),
        control_wall_ratio=ratio(wall, 2),
        control_cpu_ratio=ratio(cpu, 2),
        plain_seconds=statistics.median(wall[1]),
        plain_cpu_seconds=statistics.median(cpu[1]) / topology.grid.world_size,
        num_rounds=number,
        marks_per_step=marks_per_step,
        seconds_per_mark=seconds_per_mark(),
        attribution_seconds=attribution_seconds(engine.schedule, topology.grid, log_interval),
    )


def seconds_per_mark(num_marks: int = 5_000) -> float:
    """CPU seconds of a mark: to make it, to look at it when its step is read, and to add it up; the best of 5."""
    ledger, clock = Ledger(), HostClock()
    posted = ledger.post("all_reduce", "tp", "mlp forward", torch.zeros(1), 2)
    best = float("inf")
    for _ in range(5):
        marks, tally = TimeMarks(clock), StepTally()
        marks.begin(0, is_marked=True)
        marks.enter(StepPart.FORWARD_BACKWARD)
        marks.instruction(Action(Kind.F, 0, 0))
        start = time.thread_time()
        for _ in range(num_marks // 2):
            marks.wait_begins(posted)
            marks.wait_ends()
        marks.end_step(next_is_marked=False)
        marked = marks.take(1)
        assert marked is not None
        tally.add(1, marked.activities, clock.elapsed(marked.marks))
        best = min(best, (time.thread_time() - start) / num_marks)
    return best


def attribution_seconds(schedule: Schedule, grid: RankGrid, num_steps: int) -> float:
    """CPU seconds per step to tell the waits of all ranks apart, `num_steps` at a time; the best of 5."""
    attribution = Attribution(schedule, [grid.coordinates(rank) for rank in range(grid.world_size)])
    per_step = len(STEP_NUMBERS) + 2 * num_actions(schedule) if num_actions(schedule) else 0
    rows = np.zeros((grid.world_size, USUAL + 1 + num_steps * per_step))
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()
        attribution.work_out(rows, 1, num_steps)
        best = min(best, (time.thread_time() - start) / num_steps)
    return best


def show(result: Result, console: Console) -> None:
    table = Table(caption=f"medians of {result.num_rounds} with 95 % intervals; counted on the first rank, in CPU time")
    for heading in ("", "measured / plain", "control / plain", "a plain step"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    milliseconds = f"{result.plain_seconds * 1e3:.1f} ms"
    table.add_row("wall time", str(result.wall_ratio), str(result.control_wall_ratio), milliseconds)
    milliseconds = f"{result.plain_cpu_seconds * 1e3:.1f} ms a rank"
    table.add_row("CPU time", str(result.cpu_ratio), str(result.control_cpu_ratio), milliseconds)
    table.add_section()
    table.add_row("marks", "", "", f"{result.marks_per_step:.0f} x {result.seconds_per_mark * 1e6:.2f} µs")
    table.add_row("attribution", "", "", f"{result.attribution_seconds * 1e6:.0f} µs")
    table.add_row("counted", f"{1 + result.counted:.5f}", "", "")
    console.print(table)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(
        "telemetry_overhead",
        "Steps with and without the measuring of their times, in interleaved rounds, on random tokens.",
    )
    parser.add_argument("--rounds", type=int, default=100, help="rounds of three timed steps, at most")
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="after which no round begins, once there are enough"
    )
    return parser.parse_args(argv)


def run(argv: Sequence[str]) -> Result:
    """Measure on every rank; rank 0 prints."""
    options = parse(argv)
    with ready(options.config) as stepping:
        config = stepping.rank.config
        # As in training: marks are objects, and would make Python collect its garbage more often in the middle of a step.
        with GarbageCollection(config.runtime.gc_interval):
            result = compare(stepping, options.rounds, options.seconds, config.telemetry.log_interval)
        if stepping.rank.number == 0:
            show(result, Console())
    return result


def main(argv: Sequence[str]) -> int:
    """Run one rank of the command."""
    run(argv)
    return 0


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
