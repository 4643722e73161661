"""Dropout without state: whether an element is kept is a hash of who it is.

    keep(element) = hash(seed, sample id, site, position of the element in the whole activation of that sample) >= p 2^32

A mask therefore does not depend on the layout, the microbatch, the schedule, the device or what ran before: recomputation
replays it, a resumed run continues it, and a rank that holds a slice draws exactly its slice. The hash is `engine/mix64.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.mix64 import GOLDEN, key64, mix64_, shift_right
from engine.precision import accumulation_dtype
from engine.transfers import to_device


@dataclass(frozen=True, slots=True)
class DropoutKeys:
    """What identifies the microbatch in the hash: the run's seed and the consumed-sample index of each of its b samples."""

    seed: int
    sample_ids: Sequence[int]

    def site(self, name: str) -> list[int]:
        """One 64-bit key per sample for the dropout site `name` (it carries the global layer number)."""
        return [key64(f"{self.seed}/{sample}/{name}") for sample in self.sample_ids]


def dropout(
    x: torch.Tensor, p: float, keys: DropoutKeys, site: str, positions: torch.Tensor, batch_dim: int
) -> torch.Tensor:
    """Zero elements with probability p and scale the rest by 1 / (1 - p).

    Args:
        x: any float tensor.
        p: drop probability, 0 <= p < 1; 0 returns x.
        keys: seed and samples.
        site: name of this dropout.
        positions: int64, broadcastable to x with size 1 in `batch_dim`: where each element stands in the whole
            (unsharded) activation of one sample.
        batch_dim: the dim of x that runs over samples.
    """
    if p == 0.0:
        return x
    shape = [1] * x.dim()
    shape[batch_dim] = -1
    sample_keys = to_device(keys.site(site), torch.int64, x.device).view(shape)
    keep = _hash(positions, sample_keys) >= int(p * 2**32)
    factor = keep.to(accumulation_dtype(x.dtype)).mul_(1.0 / (1.0 - p))
    return x * factor.to(x.dtype)


def _hash(positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """A number in [0, 2^32) per element: splitmix64's output at counter key + position * golden, upper half."""
    return shift_right(mix64_(keys + (positions + 1) * GOLDEN), 32)
