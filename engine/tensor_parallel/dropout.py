"""Stateless dropout, in which a hash of an element's identity decides whether the element is dropped.

    keep(element) = hash(seed, sample id, site, the element's position in the sample's whole activation) >= p 2^32, p = drop rate

A mask does not depend on layout, microbatch, schedule, device or earlier calls. `engine/numerics/hashing.py` defines the hash;
`engine/kernels/dropout.py` applies it. The device hashes sample ids, too. The host passes no number that differs between
microbatches, so the CUDA graph of one serves another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from triaxis.engine.device.host_copy import to_device
from triaxis.engine.kernels.dropout import keyed_dropout, sample_keys
from triaxis.engine.kernels.fusion import EAGER, Fusion
from triaxis.engine.numerics.hashing import key64


@dataclass(frozen=True, slots=True)
class DropoutSites:
    """The dropout sites of a chunk: a 64-bit word of each name and of the run's seed, which stays on the device.

    Attributes:
        seed: the run's seed.
    """

    seed: int
    _words: dict[str, torch.Tensor] = field(default_factory=dict, init=False)

    def word(self, name: str, device: torch.device) -> torch.Tensor:
        """Return the word of a site, int64 [1]. `name` contains the global layer number."""
        if name not in self._words:
            self._words[name] = to_device([key64(f"{self.seed}/{name}")], torch.int64, device)
        return self._words[name]


@dataclass(frozen=True, slots=True)
class DropoutKeys:
    """Hash inputs that are fixed for one microbatch.

    Attributes:
        sites: the chunk's dropout sites.
        sample_ids: indices of the b samples among all that the run consumes. Only observers read them; in a CUDA graph, they
            are those of its recording.
        samples: the same on the device, int64 [b]; None: the model has no dropout.
        positions: token positions within their samples, int64 [b, s/cp]; None means 0 .. s - 1.
    """

    sites: DropoutSites
    sample_ids: Sequence[int]
    samples: torch.Tensor | None
    positions: torch.Tensor | None = None

    def rows(self, length: int, device: torch.device) -> torch.Tensor:
        """Return this rank's token positions within their samples.

        Returns:
            int64 [length, 1], or [length, b] if samples differ.
        """
        return torch.arange(length, device=device).unsqueeze(1) if self.positions is None else self.positions.t()

    def of_site(self, name: str, fusion: Fusion) -> torch.Tensor:
        """Compute one 64-bit key per sample for the dropout site `name`, int64 [b]."""
        assert self.samples is not None, "the microbatch was read for a model without dropout"
        return fusion(sample_keys)(self.sites.word(name, self.samples.device), self.samples)


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
        keys: dropout sites and sample ids.
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
    return keyed_dropout(x, residual, keys.of_site(site, fusion).view(shape), positions, p, fusion)
