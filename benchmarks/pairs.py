"""Calls that are timed in turn in one process, and the medians of their ratios: what else a machine does slows both of a pair."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu_contenders.ceiling import synchronize


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and the order statistics that hold the true median with at least 95 % probability."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the median of independent values with a distribution-free interval.

    The number of values below the true median is binomial(n, 1/2), so the k-th smallest and k-th largest hold it with
    probability 1 - 2 P(fewer than k below); k is the largest that keeps `confidence` (all values when n is small).
    """
    ordered, n = sorted(values), len(values)
    k, tail = 0, 0.0
    while k < n // 2 and tail + math.comb(n, k) / 2**n <= (1 - confidence) / 2:
        tail += math.comb(n, k) / 2**n
        k += 1
    k = max(k, 1)
    return Interval(statistics.median(ordered), ordered[k - 1], ordered[n - k])


@dataclass(frozen=True, slots=True)
class Seconds:
    """What a call took, of the clock and of this process on its processors."""

    wall: float
    cpu: float


def in_turn(
    calls: Mapping[str, Callable[[], object]], rounds: int, warm_up: int, device: torch.device
) -> dict[str, list[Seconds]]:
    """Make each call once a round, the order turning from round to round; the first `warm_up` rounds are not timed."""
    taken: dict[str, list[Seconds]] = {name: [] for name in calls}
    for number in range(-warm_up, rounds):
        for name in calls if number % 2 == 0 else reversed(calls):
            synchronize(device)
            wall, cpu = time.perf_counter(), time.process_time()
            calls[name]()
            synchronize(device)
            if number >= 0:
                taken[name].append(Seconds(time.perf_counter() - wall, time.process_time() - cpu))
    return taken
