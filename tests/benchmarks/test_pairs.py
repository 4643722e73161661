"""Calls are made in turn, and the interval of a median is the one that is needed."""

import math

import pytest
import torch

from benchmarks.pairs import Interval, in_turn, median_interval


def test_the_order_turns_and_the_first_rounds_are_not_timed() -> None:
    made: list[str] = []
    calls = {name: lambda name=name: made.append(name) for name in "ab"}
    taken = in_turn(calls, rounds=2, warm_up=1, device=torch.device("cpu"))
    assert "".join(made) == "baabba"
    assert {name: len(times) for name, times in taken.items()} == {"a": 2, "b": 2}


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 5, 6, 15, 40])
def test_the_interval_of_a_median_is_the_widest_that_is_needed(n: int) -> None:
    interval = median_interval([float(value) for value in reversed(range(1, n + 1))])
    k = int(interval.low)
    assert interval == Interval((n + 1) / 2, k, n + 1 - k)

    def outside(order: int) -> float:
        """Probability that the true median is not between the order-th smallest and largest value."""
        return 2 * sum(math.comb(n, below) for below in range(order)) / 2**n

    assert k == 1 or outside(k) <= 0.05
    assert n < 3 or outside(k + 1) > 0.05
