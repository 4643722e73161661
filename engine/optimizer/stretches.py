"""Adjacent runs of elements, updated in one launch even if their rules differ.

Weights decay and biases do not, so a bucket consists of short runs, each with one `UpdateRule`:

    elements    | 0 0 0 0 0 0 | 1 | 0 0 0 0 | 1 | 0 0 0 | gap | 0 0 0 0 |        each run's rule number
    launches    |                 first                 |     |  second |        one per stretch without a gap
    kept        [ 0 0 0 1 0 0 1 .. ]                                             one rule number per block of elements

The block length is the greatest common divisor of 1024 and all run lengths. In most models it is at least 64, so the int32 rule
numbers take at most one byte per 16 elements. Gaps are padding, which no update may touch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from triaxis.engine.config.quantities.update_settings import UpdateRule

_LONGEST_BLOCK = 1024

Run = tuple[slice, UpdateRule]
"""A slice of an owned part, and the rule that updates it."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Adjacent runs of elements, without gaps, that one kernel launch updates together.

    Attributes:
        where: slice of the owned part (this rank's part of a bucket) that the runs cover.
        rules: int32 [blocks], each block's rule number.
    """

    where: slice
    rules: torch.Tensor

    @classmethod
    def of(cls, runs: Sequence[Run], numbers: Mapping[UpdateRule, int], device: torch.device) -> "Stretch":
        """Join runs of elements that have no gaps between them.

        `numbers` gives each update rule's number in `rules`.
        """
        lengths = [where.stop - where.start for where, _ in runs]
        block = math.gcd(_LONGEST_BLOCK, *lengths)
        if block == sum(lengths) and block % 2 == 0:
            # Two blocks instead of one: the compiler would build a separate kernel for a single block.
            block //= 2
        rules = [
            torch.full((length // block,), numbers[rule], dtype=torch.int32, device=device)
            for length, (_, rule) in zip(lengths, runs, strict=True)
        ]
        return cls(slice(runs[0][0].start, runs[-1][0].stop), torch.cat(rules))

    def blocks(self, elements: torch.Tensor) -> torch.Tensor:
        """View the stretch's elements [n] as [blocks, elements per block]."""
        return elements.view(len(self.rules), -1)


def stretches(runs: Sequence[Run], numbers: Mapping[UpdateRule, int], device: torch.device) -> list[Stretch]:
    """Join adjacent runs of elements; a gap begins a new stretch. `numbers`: each rule's number in `Stretch.rules`."""
    ends = [place for place, (one, other) in enumerate(pairwise(runs), start=1) if one[0].stop != other[0].start]
    cuts = pairwise([0, *ends, len(runs)])
    return [Stretch.of(runs[start:stop], numbers, device) for start, stop in cuts if start < stop]
