"""What measuring the time of a step costs: the same steps with and without it, side by side, in one run.

    round 1   measured, plain, control       ratio = measured / plain, wall seconds and CPU seconds of all ranks
    round 2   plain, control, measured       the control is plain as well: its ratio says what the machine lets one see
    result    median of the ratios, with the interval that holds it with 95 % probability

Machines are rarely quiet enough to see half a percent in a ratio, so the cost is counted too: marks in a step, times what a mark
costs to make and to add up (CPU seconds, in a loop), over the CPU seconds of a plain step of one rank. What is CPU time here is
less than the time of a step that waits, so the share of the time is smaller. The exchange before a line is in the ratios only.

    OMP_NUM_THREADS=1 python -m benchmarks.telemetry_overhead configs/gpt_tiny.yaml parallel.tp=1 parallel.pp=1 parallel.vpp=1 \\
        parallel.dp=1 parallel.sequence_parallel=false
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.telemetry_overhead configs/gpt_tiny.yaml parallel.pp=1 \\
        parallel.vpp=1 parallel.dp=1 train.global_batch_size=8 --rounds 100
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine_overhead import Interval, median_interval
from engine.collectives import Ledger
from engine.config import TelemetryConfig
from engine.data.loader import Batches
from engine.data.synthetic import SyntheticDataset
from engine.garbage import GarbageCollection
from engine.runtime import RankEnvironment
from engine.step import Engine
from engine.telemetry.clocks import HostClock
from engine.telemetry.marks import Marks
from engine.telemetry.step_times import StepTimes
from engine.telemetry.time_split import Tally
from engine.train import build
from launch.rank import join, read_config
from models.gpt import build_chunks

LEARNING_RATE = 1e-3
WARM_UP_ROUNDS = 2
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
    marks_per_step: float
    seconds_per_mark: float

    @property
    def counted(self) -> float:
        """CPU seconds of a step's marks over those of a plain step."""
        return self.marks_per_step * self.seconds_per_mark / self.plain_cpu_seconds


def compare(engine: Engine, batches: Batches, num_rounds: int, log_interval: int) -> Result:
    """Make `num_rounds` rounds of three steps; every rank calls it."""
    topology, clock = engine.topology, CountingClock()
    times = StepTimes(
        TelemetryConfig(log_interval=log_interval),
        topology,
        engine.train_program.schedule,
        num_steps=NEVER,
        steps_made=0,
        clock=clock,
    )
    listening = topology.ledger.clock
    steps_made = 0

    def plain_step() -> None:
        microbatches = batches.next_step()
        engine.update(engine.forward_backward(microbatches), LEARNING_RATE).wait()

    def measured_step() -> None:
        nonlocal steps_made
        topology.ledger.clock, engine.executor.observer = listening, times.instruction
        times.phase("data")
        microbatches = batches.next_step()
        times.phase("forward_backward")
        counts = engine.forward_backward(microbatches)
        times.phase("optimizer")
        engine.update(counts, LEARNING_RATE).wait()
        times.end_step()
        steps_made += 1
        times.on_step(steps_made)
        topology.ledger.clock, engine.executor.observer = None, None

    sides = (measured_step, plain_step, plain_step)
    wall: list[list[float]] = [[], [], []]
    cpu: list[list[float]] = [[], [], []]
    first_marks = 0
    for number in range(-WARM_UP_ROUNDS, num_rounds):
        if number == 0:
            first_marks = clock.num_marks
        for place in range(len(sides)):
            side = (place + number) % len(sides)
            # Together, so that no rank's step begins with the wait for another's last one.
            topology.axis("world").agree([0.0], topology.device, "benchmark")
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            sides[side]()
            wall_seconds, cpu_seconds = time.perf_counter() - wall_start, time.process_time() - cpu_start
            (all_cpu_seconds,) = topology.axis("world").agree([cpu_seconds], topology.device, "benchmark")
            if number >= 0:
                wall[side].append(wall_seconds)
                cpu[side].append(all_cpu_seconds)
    marks_per_step = (clock.num_marks - first_marks) / num_rounds
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
        marks_per_step=marks_per_step,
        seconds_per_mark=seconds_per_mark(),
    )


def seconds_per_mark(num_marks: int = 5_000) -> float:
    """CPU seconds of a mark: to make it, to look at it when its step is read, and to add it up; the best of 5."""
    ledger, clock = Ledger(), HostClock()
    posted = ledger.post("all_reduce", "tp", "mlp forward", torch.zeros(1), 2)
    best = float("inf")
    for _ in range(5):
        marks, tally = Marks(clock, lambda step: True, 0), Tally()
        marks.phase("forward_backward")
        start = time.thread_time()
        for _ in range(num_marks // 2):
            marks.wait_begins(posted)
            marks.wait_ends()
        marks.end_step()
        marked = marks.take(1)
        assert marked is not None
        tally.add(1, marked.doings, clock.elapsed(marked.marks))
        best = min(best, (time.thread_time() - start) / num_marks)
    return best


def show(result: Result, console: Console) -> None:
    table = Table(caption="medians with 95 % intervals; counted: marks x CPU time of one / plain step")
    for heading in ("", "measured / plain", "control / plain", "a plain step"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    milliseconds = f"{result.plain_seconds * 1e3:.1f} ms"
    table.add_row("wall time", str(result.wall_ratio), str(result.control_wall_ratio), milliseconds)
    milliseconds = f"{result.plain_cpu_seconds * 1e3:.1f} ms a rank"
    table.add_row("CPU time", str(result.cpu_ratio), str(result.control_cpu_ratio), milliseconds)
    cost = f"{result.marks_per_step:.0f} x {result.seconds_per_mark * 1e6:.2f} µs"
    table.add_row("counted", f"{1 + result.counted:.5f}", "", cost)
    console.print(table)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m benchmarks.telemetry_overhead",
        description="Steps with and without the measuring of their times, in interleaved rounds, on random tokens.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("config", nargs="+", help="config.yaml, then section.key=value")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of three timed steps")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> Result:
    options = parse(argv)
    environment = RankEnvironment.from_variables(os.environ)
    config = read_config(options.config, environment)
    with join(config, environment) as rank:
        engine = build(config, rank.topology, build_chunks)
        batches = Batches(
            SyntheticDataset(config.train.seed, config.model.vocab_size, config.model.seq_length),
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=config.train.micro_batch_size,
            dp=rank.topology.sizes.dp,
            dp_rank=rank.topology.coordinates.dp,
            consumed_samples=0,
            device=rank.topology.device,
        )
        # As in training: marks are objects, and would make Python collect its garbage more often in the middle of a step.
        with GarbageCollection(config.runtime.gc_interval):
            result = compare(engine, batches, options.rounds, config.telemetry.log_interval)
        batches.close()
        if rank.number == 0:
            show(result, Console())
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
