"""Ratios that describe the expert load in a layer.

max over mean    the fullest expert's tokens over the mean: 1 is even, E / k is a layer in which k experts do all the work
entropy          -sum p ln p / ln E over the load shares p: 1 is even, 0 is all on one expert
"""

import math
from collections.abc import Sequence


def max_over_mean(counts: Sequence[int]) -> float:
    """Largest count over the mean; NaN if all counts are zero."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else math.nan


def entropy(counts: Sequence[int]) -> float:
    """Entropy of the shares, relative to an even load, 0 to 1; NaN if all counts are zero."""
    total = sum(counts)
    if not total:
        return math.nan
    shares = [count / total for count in counts if count]
    return abs(sum(share * math.log(share) for share in shares)) / math.log(len(counts))
