"""Computes two ratios that tell how evenly a layer's tokens are spread over its experts.

A layer has E experts, and each token uses k of them:

max over mean    the fullest expert's tokens over the mean: 1 if the load is even, E / k if k experts do all the work
entropy          -sum p ln p / ln E over the experts' shares p: 1 if the load is even, 0 if one expert does all the work
"""

import math
from collections.abc import Sequence


def max_over_mean(counts: Sequence[int]) -> float:
    """Divide the largest count by the mean. NaN if all counts are zero."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else math.nan


def entropy(counts: Sequence[int]) -> float:
    """Compute the entropy of the shares, relative to an even load, 0 to 1. NaN if all counts are zero."""
    total = sum(counts)
    if not total:
        return math.nan
    shares = [count / total for count in counts if count]
    return abs(sum(share * math.log(share) for share in shares)) / math.log(len(counts))
