"""Dropout without state: an element is kept or dropped by a hash of its identity.

    keep(element) = hash(seed, sample id, site, position of the element in the whole activation of that sample) >= p 2^32

A mask therefore does not depend on the layout, the microbatch, the schedule, the device or earlier calls: recomputation replays it,
a resumed run continues it, and a rank that holds a slice draws exactly its slice. The hash is in `engine/numerics/hashing.py`;
`engine/kernels/dropout.py` applies it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triaxis.engine.device.host_copy import to_device
from triaxis.engine.kernels.dropout import keyed_dropout
from triaxis.engine.kernels.fusion import EAGER, Fusion
from triaxis.engine.numerics.hashing import key64


@dataclass(frozen=True, slots=True)
class DropoutKeys:
    """The inputs of the hash that one microbatch fixes.

    Attributes:
        seed: the run's seed.
        sample_ids: consumed-sample index of each of the b samples.
        positions: int64 [b, s/cp], the position of each token in its sample; None: 0 .. s - 1.
    """

    seed: int
    sample_ids: Sequence[int]
    positions: torch.Tensor | None = None

    def rows(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the position of each of `length` tokens in its sample: int64 [length, 1], or [length, b] if samples differ."""
        return torch.arange(length, device=device).unsqueeze(1) if self.positions is None else self.positions.t()

    def site(self, name: str) -> list[int]:
        """Compute one 64-bit key per sample for the dropout site `name`, which contains the global layer number."""
        return [key64(f"{self.seed}/{sample}/{name}") for sample in self.sample_ids]


def dropout(
    x: torch.Tensor,
    p: float,
    keys: DropoutKeys,
    site: str,
    positions: torch.Tensor,
    batch_dim: int,
    fusion: Fusion = EAGER,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Zero elements with probability p and scale the rest by 1 / (1 - p); then add the residual, if there is one.

    Args:
        x: any float tensor.
        p: drop probability, 0 <= p < 1.
        keys: seed and samples.
        site: name of this dropout.
        positions: int64, broadcastable to x: index of each element in the whole (unsharded) activation of one sample.
        batch_dim: the dim of x that runs over samples.
        fusion: runs the kernel.
        residual: tensor of x's shape to add, or None.
    """
    if p == 0.0:
        return x if residual is None else residual + x
    shape = [1] * x.dim()
    shape[batch_dim] = -1
    sample_keys = to_device(keys.site(site), torch.int64, x.device).view(shape)
    return keyed_dropout(x, residual, sample_keys, positions, p, fusion)
