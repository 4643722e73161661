"""Dropout without state: whether an element is kept is a hash of who it is.

    keep(element) = hash(seed, sample id, site, position of the element in the whole activation of that sample) >= p 2^32

A mask therefore does not depend on the layout, the microbatch, the schedule, the device or what ran before: recomputation
replays it, a resumed run continues it, and a rank that holds a slice draws exactly its slice. The hash is the finaliser
of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), applied to a counter.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.precision import accumulation_dtype

_SIGN = 1 << 63
_WORD = 1 << 64


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch stores."""
    return (value + _SIGN) % _WORD - _SIGN


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class DropoutKeys:
    """What identifies the microbatch in the hash: the run's seed and the consumed-sample index of each of its b samples."""

    seed: int
    sample_ids: Sequence[int]

    def site(self, name: str) -> list[int]:
        """One 64-bit key per sample for the dropout site `name` (it carries the global layer number)."""
        return [
            _signed(
                int.from_bytes(hashlib.blake2b(f"{self.seed}/{sample}/{name}".encode(), digest_size=8).digest(), "big")
            )
            for sample in self.sample_ids
        ]


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
    sample_keys = torch.tensor(keys.site(site), device=x.device).view(shape)
    keep = _hash(positions, sample_keys) >= int(p * 2**32)
    scale = torch.tensor(1.0 / (1.0 - p), dtype=accumulation_dtype(x.dtype), device=x.device)
    return x * (keep * scale).to(x.dtype)


def _hash(positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """A number in [0, 2^32) per element: splitmix64's output at counter key + position * golden, upper half."""
    z = keys + (positions + 1) * _GOLDEN
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return _shift_right(z ^ _shift_right(z, 31), 32)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; torch's >> on int64 copies the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
