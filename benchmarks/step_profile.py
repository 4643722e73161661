"""Time of one rank's step when several ranks share a machine: computing, Python, waiting, standing aside.

    wall time of a step = CPU time of the main thread   compiled functions (torch.., methods of tensors, run_backward)
                                                        Python, with the operators in it (x @ w, a + b, x[i])
                        + off the CPU                   waiting for a call on an axis (inside `Pending.wait`), by axis
                                                        elsewhere: a core was busy with another process

Wall and CPU times, and the waits, come from steps without a profiler. How CPU time divides into compiled and Python comes
from further steps under cProfile with the thread's CPU clock: it is a share, and the profiler makes Python look dearer.
It also counts an operator's work to the Python function that it stands in.
Other threads of the rank (gloo's, the sends' watchers) run beside the main one; their CPU time is given apart.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 -m benchmarks.step_profile configs/gpt_tiny.yaml
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.step_profile configs/gpt_tiny.yaml \\
        parallel.pp=1 parallel.vpp=1 parallel.dp=1
"""

import argparse
import cProfile
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.rank_steps import LEARNING_RATE, parser_of, ready, timed
from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.ledger import Ledger
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.step import Engine
from triaxis.launch.rank.join import Rank
from triaxis.launch.start.process.ending import run_rank

WARM_UP_STEPS = 3


@dataclass
class Waits:
    """Seconds off the CPU inside `Pending.wait`, and calls waited for, by axis and purpose."""

    seconds: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class StepTimes:
    """Means per step of one rank, in seconds, and of all ranks together."""

    wall: float
    main_thread_cpu: float
    other_threads_cpu: float
    all_ranks_cpu: float
    waits: Waits
    num_steps: int


@contextmanager
def timed_waits(ledger: Ledger) -> Iterator[Waits]:
    """Measure every `Pending.wait` of this process that ends a call in `ledger`."""
    waits = Waits()
    original = Pending.wait

    def wait(self: Pending) -> torch.Tensor:
        known, wall, cpu = len(ledger.events), time.perf_counter(), time.thread_time()
        result = original(self)
        off_cpu = (time.perf_counter() - wall) - (time.thread_time() - cpu)
        if len(ledger.events) > known:
            event = ledger.events[-1]
            waits.seconds[f"{event.axis}: {event.purpose}"] += max(off_cpu, 0.0)  # type: ignore[assignment]
            waits.calls[f"{event.axis}: {event.purpose}"] += 1
        return result

    Pending.wait = wait  # type: ignore[method-assign]
    try:
        yield waits
    finally:
        Pending.wait = original  # type: ignore[method-assign]


def measure(engine: Engine, next_step: Callable[[], list[MicroBatch]], num_steps: int) -> StepTimes:
    """Run `num_steps` steps without a profiler."""
    with timed_waits(engine.topology.ledger) as waits:
        steps = [timed(lambda: engine.train_step(next_step(), LEARNING_RATE)) for _ in range(num_steps)]
    main, process = fmean(step.main_thread for step in steps), fmean(step.process for step in steps)
    (everybody,) = engine.topology.axis("world").sum_values([process], engine.topology.device, "profile")
    return StepTimes(fmean(step.wall for step in steps), main, process - main, everybody, waits, num_steps)


def profile(engine: Engine, next_step: Callable[[], list[MicroBatch]], num_steps: int) -> pstats.Stats:
    """CPU time of the main thread by function over `num_steps` steps."""
    profiler = cProfile.Profile(timer=time.thread_time)
    for _ in range(num_steps):
        microbatches = next_step()
        profiler.enable()
        engine.train_step(microbatches, LEARNING_RATE)
        profiler.disable()
    return pstats.Stats(profiler)


def functions(stats: pstats.Stats) -> list[tuple[str, bool, int, float]]:
    """(name, whether it is compiled code, calls, own CPU seconds), the dearest first."""
    rows = []
    table: dict[tuple[str, int, str], Any] = stats.stats  # type: ignore[attr-defined]
    for (file, line, name), (_, calls, own, _, _) in table.items():
        compiled = file == "~"
        label = name.strip("<>").replace("built-in method ", "") if compiled else f"{short_path(file)}:{line} {name}"
        rows.append((label, compiled, calls, own))
    return sorted(rows, key=lambda row: -row[3])


def short_path(file: str) -> Path:
    """The path from here for files of ours, from the package's folder for installed ones."""
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        return path.relative_to(Path.cwd())
    if "site-packages" in path.parts:
        return Path(*path.parts[path.parts.index("site-packages") + 1 :])
    return path


def show(rank: Rank, times: StepTimes, stats: pstats.Stats, num_profiled: int, top: int, console: Console) -> None:
    """Two tables: where the step goes, and the dearest functions."""
    rows = functions(stats)
    profiled = sum(row[3] for row in rows)
    compiled_share = sum(row[3] for row in rows if row[1]) / profiled
    waiting = sum(times.waits.seconds.values()) / times.num_steps

    table = Table(
        title=f"rank {rank.number} ({rank.topology.coordinates}), {times.num_steps} steps", title_justify="left"
    )
    for heading in ("a step", "ms", "share"):
        table.add_column(heading, justify="left" if heading == "a step" else "right", no_wrap=True)

    def add(label: str, seconds: float, style: str | None = None) -> None:
        table.add_row(label, f"{seconds * 1e3:.2f}", f"{seconds / times.wall:.1%}", style=style)

    add("compiled functions, CPU", times.main_thread_cpu * compiled_share)
    add("Python and its operators, CPU", times.main_thread_cpu * (1 - compiled_share))
    add("waiting for calls, off CPU", waiting)
    for purpose, seconds in times.waits.seconds.most_common(5):
        add(f"  {purpose} ({times.waits.calls[purpose] / times.num_steps:g} calls)", seconds / times.num_steps, "dim")
    add("off CPU elsewhere", times.wall - times.main_thread_cpu - waiting)
    table.add_section()
    add("wall", times.wall, "bold")
    table.add_section()
    add("beside: this rank's other threads, CPU", times.other_threads_cpu)
    add("beside: all ranks, CPU", times.all_ranks_cpu)
    console.print(table)

    table = Table(title=f"dearest functions of its main thread, {num_profiled} steps", title_justify="left")
    table.add_column("function", overflow="ellipsis", no_wrap=True, max_width=console.width - 34)
    for heading in ("calls", "ms", "share"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=5)
    for label, _, calls, own in rows[:top]:
        table.add_row(label, f"{calls / num_profiled:g}", f"{own / num_profiled * 1e3:.2f}", f"{own / profiled:.1%}")
    console.print(table)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("step_profile", "Where one rank's step goes, on random tokens.")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed")
    parser.add_argument("--profiled", type=int, default=5, help="further steps under the profiler")
    parser.add_argument("--rank", type=int, default=0, help="whose step is shown")
    parser.add_argument("--top", type=int, default=15, help="functions in the second table")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    with ready(options.config) as stepping:
        for _ in range(WARM_UP_STEPS):
            stepping.engine.train_step(stepping.next_step(), LEARNING_RATE)
        times = measure(stepping.engine, stepping.next_step, options.steps)
        stats = profile(stepping.engine, stepping.next_step, options.profiled)
        if stepping.rank.number == options.rank:
            show(stepping.rank, times, stats, options.profiled, options.top, Console())
    return 0


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
