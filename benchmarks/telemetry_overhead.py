"""Cost of measuring the time of a step, counted: CPU seconds of the measuring, over those of a step without it.

    marks          of a step, times what a mark costs to make and to add up (a loop)
    attribution    what putting the ranks' numbers together costs the first rank per step (a replay of the pipelines)

Machines are rarely quiet enough to see half a percent in a ratio of two steps. What is CPU time here is less than the time of a
step that waits, so the share of the time is smaller. The exchange before a line is not counted.

    OMP_NUM_THREADS=1 python -m benchmarks.telemetry_overhead configs/gpt_tiny.yaml parallel.tp=1 parallel.pp=1 parallel.vpp=1 \\
        parallel.dp=1 parallel.sequence_parallel=false
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.telemetry_overhead configs/gpt_tiny.yaml parallel.pp=1 \\
        parallel.vpp=1 parallel.dp=1 train.global_batch_size=8
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from triaxis.engine.comm.ledger import Ledger
from triaxis.engine.comm.runtime import RankEnvironment
from triaxis.engine.config.schema.telemetry import TelemetryConfig
from triaxis.engine.data.synthetic import SyntheticDataset
from triaxis.engine.layout.rank_grid import RankGrid
from triaxis.engine.pipeline.actions import Action, Kind, Schedule
from triaxis.engine.run.garbage import GarbageCollection
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.telemetry.timing.bubble import Attribution, num_actions
from triaxis.engine.telemetry.timing.clocks import HostClock
from triaxis.engine.telemetry.timing.marks import TimeMarks
from triaxis.engine.telemetry.timing.step_times import StepTimes
from triaxis.engine.telemetry.timing.time_split import STEP_NUMBERS, USUAL, StepTally
from triaxis.engine.train import build
from triaxis.launch.rank.batches import open_batches
from triaxis.launch.rank.join import Rank, join, read_config
from triaxis.launch.start.process.ending import run_rank
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute

LEARNING_RATE = 1e-3
WARM_UP_STEPS = 2
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
    """What the first rank counted; a plain step's CPU seconds are of one rank (the mean of all)."""

    plain_cpu_seconds: float
    marks_per_step: float
    seconds_per_mark: float
    attribution_seconds: float

    @property
    def counted(self) -> float:
        """CPU seconds of a step's marks, and of its share in the attribution, over those of a plain step: on the first rank."""
        return (self.marks_per_step * self.seconds_per_mark + self.attribution_seconds) / self.plain_cpu_seconds


def measure(rank: Rank, num_steps: int) -> Result:
    """Make steps without marks, then as many with them; every rank calls it."""
    config, topology = rank.config, rank.topology
    engine = build(resolve_recompute(config, topology.sizes), topology, build_chunks)
    dataset = SyntheticDataset(config.train.seed, config.model.vocab_size, config.model.seq_length)
    batches, world = open_batches(config, topology, dataset), topology.axis("world")
    cpu = []
    for _ in range(WARM_UP_STEPS + num_steps):
        # Together, so that no rank's step begins with the wait for another's last one.
        world.barrier(topology.device, "benchmark")
        began = time.process_time()
        engine.train_step(batches.next_step(), LEARNING_RATE)
        (seconds,) = world.sum_values([time.process_time() - began], topology.device, "benchmark")
        cpu.append(seconds)

    clock, log_interval = CountingClock(), config.telemetry.log_interval
    marks = TimeMarks(clock)
    times = StepTimes(TelemetryConfig(log_interval=log_interval), topology, engine.schedule, marks, num_steps=NEVER)
    topology.ledger.observers, engine.executor.observers = (marks,), (marks.instruction,)
    times.begin(0)
    first_marks = 0
    for step in range(1, WARM_UP_STEPS + num_steps + 1):
        times.enter(StepPart.DATA)
        microbatches = batches.next_step()
        times.enter(StepPart.FORWARD_BACKWARD)
        losses = engine.forward_backward(microbatches)
        times.enter(StepPart.OPTIMIZER)
        engine.update(losses, LEARNING_RATE).wait()
        times.end_step()
        times.on_step(step)
        if step == WARM_UP_STEPS:
            first_marks = clock.num_marks
    marks_per_step = (clock.num_marks - first_marks) / num_steps
    times.finish()
    batches.close()
    return Result(
        plain_cpu_seconds=statistics.median(cpu[WARM_UP_STEPS:]) / topology.grid.world_size,
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
    table = Table(caption="CPU time per step", show_header=False)
    table.add_row("a plain step", f"{result.plain_cpu_seconds * 1e3:.1f} ms")
    table.add_row("marks", f"{result.marks_per_step:.0f} x {result.seconds_per_mark * 1e6:.2f} µs")
    table.add_row("attribution", f"{result.attribution_seconds * 1e6:.0f} µs")
    table.add_row("of a plain step", f"{result.counted:.3%}")
    console.print(table)


def run(argv: Sequence[str]) -> Result:
    """Measure on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m benchmarks.telemetry_overhead",
        description="CPU time of measuring a step's time, over that of a step, on random tokens.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("config", nargs="+", help="config.yaml, then section.key=value")
    parser.add_argument("--steps", type=int, default=30, help="steps without marks, and with them")
    options = parser.parse_args(argv)
    environment = RankEnvironment.from_variables(os.environ)
    config = read_config(options.config, environment)
    # As in training: marks are objects, and would make Python collect its garbage more often in the middle of a step.
    with join(config, environment) as rank, GarbageCollection(config.runtime.gc_interval):
        result = measure(rank, options.steps)
        if rank.number == 0:
            show(result, Console())
    return result


def main(argv: Sequence[str]) -> int:
    """Run one rank of the command."""
    run(argv)
    return 0


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
