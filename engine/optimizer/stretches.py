"""Neighbouring runs of elements, updated in one launch whatever their rules.

Weights decay and biases do not, so the elements of a bucket are a row of short runs, each with one `UpdateRule`:

    elements    | 0 0 0 0 0 0 | 1 | 0 0 0 0 | 1 | 0 0 0 | gap | 0 0 0 0 |        the numbers of their rules
    launches    |                 first                 |     |  second |        one for each stretch without a gap
    kept        [ 0 0 0 1 0 0 1 .. ]                                             a number for each block of elements

A block is as long as all runs allow: the greatest common divisor of their lengths and 1024. In most models it is at least 64, so
the numbers (int32) take at most a byte for 16 elements. Gaps are padding, which no update may touch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from triaxis.engine.config.groups import UpdateRule

_LONGEST_BLOCK = 1024

Run = tuple[slice, UpdateRule]
"""Elements of an owned part, and the rule of their updates."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring runs of one owned part.

    Attributes:
        where: slice of its elements.
        rules: int32 [blocks], number of the rule of each block.
    """

    where: slice
    rules: torch.Tensor

    @classmethod
    def of(cls, runs: Sequence[Run], numbers: Mapping[UpdateRule, int], device: torch.device) -> "Stretch":
        """Join runs without gaps between them; `numbers` maps each rule to its number."""
        lengths = [where.stop - where.start for where, _ in runs]
        block = math.gcd(_LONGEST_BLOCK, *lengths)
        if block == sum(lengths) and block % 2 == 0:
            # Two blocks instead of one: for a single block the compiler would make another kernel.
            block //= 2
        rules = [
            torch.full((length // block,), numbers[rule], dtype=torch.int32, device=device)
            for length, (_, rule) in zip(lengths, runs, strict=True)
        ]
        return cls(slice(runs[0][0].start, runs[-1][0].stop), torch.cat(rules))

    def blocks(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the stretch's elements [n] as [blocks, elements of a block]."""
        return elements.view(len(self.rules), -1)


def stretches(runs: Sequence[Run], numbers: Mapping[UpdateRule, int], device: torch.device) -> list[Stretch]:
    """Join the runs into stretches, as few as the gaps allow."""
    ends = [place for place, (one, other) in enumerate(pairwise(runs), start=1) if one[0].stop != other[0].start]
    cuts = pairwise([0, *ends, len(runs)])
    return [Stretch.of(runs[start:stop], numbers, device) for start, stop in cuts if start < stop]
