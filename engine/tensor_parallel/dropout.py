"""Stateless dropout, in which a hash of an element's identity decides whether the element is dropped.

    keep(element) = hash(seed, sample id, site, the element's position in the sample's whole activation) >= p 2^32, p = drop rate

A mask does not depend on layout, microbatch, schedule, device or earlier calls. `engine/numerics/hashing.py` defines the hash;
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
    """Hash inputs that are fixed for one microbatch.

    Attributes:
        seed: the run's seed.
        sample_ids: indices of the b samples among all samples that the run consumes.
        positions: token positions within their samples, int64 [b, s/cp]; None means 0 .. s - 1.
    """

    seed: int
    sample_ids: Sequence[int]
    positions: torch.Tensor | None = None

    def rows(self, length: int, device: torch.device) -> torch.Tensor:
        """Return this rank's token positions within their samples.

        Returns:
            int64 [length, 1], or [length, b] if samples differ.
        """
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
    """Zero elements with probability p, scale the rest by 1 / (1 - p), and add the residual if given.

    Args:
        x: any float tensor.
        p: drop probability, 0 <= p < 1.
        keys: seed and sample ids.
        site: the dropout site's name.
        positions: element indices within one sample's whole (unsharded) activation, int64, broadcastable to x.
        batch_dim: x's sample dim.
        fusion: wrapper that runs the kernel.
        residual: tensor to add, shaped like x, or None.
    """
    if p == 0.0:
        return x if residual is None else residual + x
    shape = [1] * x.dim()
    shape[batch_dim] = -1
    sample_keys = to_device(keys.site(site), torch.int64, x.device).view(shape)
    return keyed_dropout(x, residual, sample_keys, positions, p, fusion)
