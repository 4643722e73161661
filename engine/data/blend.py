"""Maps each sample n in a weighted blend to a corpus and a sample id there.

    weights 3 : 1        n        0 1 2 3 | 4 5 6 7 | ...      the table for one period repeats forever
                         corpus   a b a a | a b a a |
                         sample   0 0 1 2 | 3 1 4 5 |          n -> (table[n % P], n // P * share + rank[n % P])

P is the period in samples. `table` names the corpus for each place in a period, and `share` is the corpus's samples per period.
`rank` counts the corpus's samples before a place in the period.

Let w be a corpus's weight divided by the sum of the weights. Samples are chosen by earliest deadline first, so after any n samples
the corpus has given floor(w n) or ceil(w n). A corpus's sample j becomes blend sample floor(j / w) at the earliest. Its deadline is
blend sample ceil((j + 1) / w) - 1. Earliest deadline first meets every deadline that can be met (the "Pfair" windows in Baruah,
Cohen, Plaxton and Varvel, Algorithmica 15, 1996). All numbers are integers, so no rounding moves a sample.
"""

import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from triaxis.engine.data.samples import Sample, SampleSource
from triaxis.engine.errors import DataError

MAX_PERIOD = 100_000
"""Longest period, in samples. Weights that need a longer one are rounded to multiples of 1 / MAX_PERIOD."""


def shares(weights: Sequence[float]) -> list[int]:
    """Compute each corpus's samples per period, as integers whose sum is the period.

    The integers have the ratio of the weights. Decimal weights are exact: 0.1 is one tenth. If the exact ratio needs a period above
    `MAX_PERIOD`, the shares are rounded for that period, each to at least 1.
    """
    assert weights and all(0 < weight < float("inf") for weight in weights), weights
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = gcd(*whole)
    whole = [share // divisor for share in whole]
    if sum(whole) <= MAX_PERIOD:
        return whole
    ideal = [Fraction(share * MAX_PERIOD, sum(whole)) for share in whole]
    rounded = [max(1, int(share)) for share in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda at: (rounded[at] - ideal[at], at))
    for turn in range(max(0, MAX_PERIOD - sum(rounded))):
        rounded[by_remainder[turn]] += 1
    return rounded


def one_period(share: Sequence[int]) -> NDArray[np.int64]:
    """Assign a corpus index to each sample in a period, int64 [sum(share)].

    A corpus's sample j must precede place ceil((j + 1) period / share), its deadline. The earliest deadline goes first. If
    deadlines are equal, the corpus with the lower index goes first.
    """
    period = sum(share)
    released: list[tuple[int, int]] = []
    waiting = [(0, corpus) for corpus in range(len(share))]
    taken = [0] * len(share)
    table = np.empty(period, np.int64)
    for n in range(period):
        while waiting and waiting[0][0] <= n:
            _, corpus = heapq.heappop(waiting)
            deadline = -(-(taken[corpus] + 1) * period // share[corpus])
            heapq.heappush(released, (deadline, corpus))
        _, corpus = heapq.heappop(released)
        table[n] = corpus
        taken[corpus] += 1
        if taken[corpus] < share[corpus]:
            heapq.heappush(waiting, (taken[corpus] * period // share[corpus], corpus))
    return table


def counts_of(weights: Sequence[float], num_samples: int) -> list[int]:
    """Count how many of a blend's first `num_samples` samples come from each corpus."""
    share = shares(weights)
    periods, rest = divmod(num_samples, sum(share))
    begun = np.bincount(one_period(share)[:rest], minlength=len(share))
    return [periods * each + int(more) for each, more in zip(share, begun, strict=True)]


class Blend:
    """Several sources merged in a fixed ratio into one.

    Args:
        sources: one source per weight; each provides a sample for every id >= 0.
        weights: positive weights; a source's fraction of the samples is its weight divided by their sum.
        first_id: id of the blend's first sample.

    Raises:
        DataError: the numbers of sources and weights differ.
    """

    def __init__(self, sources: Sequence[SampleSource], weights: Sequence[float], first_id: int = 0) -> None:
        self.sources, self.first_id = tuple(sources), first_id
        self.shares = shares(weights)
        if len(self.sources) != len(self.shares):
            raise DataError(
                f"{len(self.sources)} corpora and {len(self.shares)} weights: each corpus needs one weight."
            )
        self._table = one_period(self.shares)
        self._rank = np.empty_like(self._table)
        for source, share in enumerate(self.shares):
            self._rank[self._table == source] = np.arange(share)

    def locate(self, sample_id: int) -> tuple[int, int]:
        """Map a blend sample to (source number, sample id within that source)."""
        periods, place = divmod(sample_id - self.first_id, len(self._table))
        source = int(self._table[place])
        return source, periods * self.shares[source] + int(self._rank[place])

    def next_of_each(self, sample_id: int) -> list[tuple[SampleSource, int]]:
        """List (source, id of its next sample) for each source, when the blend has reached `sample_id`."""
        periods, place = divmod(sample_id - self.first_id, len(self._table))
        taken = np.bincount(self._table[:place], minlength=len(self.sources))
        starts = zip(self.sources, self.shares, taken, strict=True)
        return [(source, periods * share + int(count)) for source, share, count in starts]

    def __getitem__(self, sample_id: int) -> Sample:
        source, inner = self.locate(sample_id)
        return self.sources[source][inner]

    def lengths(self, sample_id: int) -> tuple[int, ...]:
        source, inner = self.locate(sample_id)
        return self.sources[source].lengths(inner)
