"""Seconds of timing a step of a large pipeline: schedule, lowering and simulator.

    python -m benchmarks.simulate                           pp 64, 512 microbatches; with tp 8 x dp 6 these are 3,072 ranks
    python -m benchmarks.simulate --pp 8 --microbatches 32

The pipelines of a step are alike, so one stands for all ranks.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.lowering import lower
from triaxis.engine.pipeline.simulate import Costs, simulate

Result = TypeVar("Result")


def timed(function: Callable[[], Result]) -> tuple[Result, float]:
    """Return a function's result and the seconds that it took."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Time each schedule and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=512)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb_h1", "interleaved"])
    args = parser.parse_args(argv)
    print("| schedule | actions | schedule, s | lowering, s | simulator, s | bubble |")
    print("|---|---|---|---|---|---|")
    for name in args.schedules:
        vpp = 2 if name == "interleaved" else 1
        schedule, building = timed(lambda name=name, vpp=vpp: schedules.build(name, args.pp, vpp, args.microbatches))
        _, lowering = timed(lambda schedule=schedule: lower(schedule))
        costs = Costs.uniform(args.pp * vpp, 1 / vpp, 1 / vpp, 1 / vpp, transfer=0.05)
        timeline, simulating = timed(lambda schedule=schedule, costs=costs: simulate(schedule, costs))
        num_actions = sum(map(len, schedule.actions))
        print(
            f"| {name} | {num_actions:,} | {building:.2f} | {lowering:.2f} | {simulating:.2f} "
            f"| {timeline.largest_bubble_fraction:.2%} |"
        )


if __name__ == "__main__":
    main()
