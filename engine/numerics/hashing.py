"""Hashes 64-bit counters on any device with splitmix64's finaliser.

The source is Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014. A 64-bit word is an int64 with the same
bits, because torch has no unsigned 64-bit arithmetic. Products and sums wrap around.
"""

import hashlib
from collections.abc import Mapping
from types import MappingProxyType

import torch

_WORD = 1 << 64
_SIGN = 1 << 63


def signed(word: int) -> int:
    """Reinterpret a 64-bit pattern as an int64."""
    return (word + _SIGN) % _WORD - _SIGN


def unsigned(word: int) -> int:
    """Reinterpret an int64 as its 64-bit pattern."""
    return word % _WORD


GOLDEN = signed(0x9E3779B97F4A7C15)
"""Factor by which a counter is multiplied before mixing."""

_MIX_1 = signed(0xBF58476D1CE4E5B9)
_MIX_2 = signed(0x94D049BB133111EB)


SAME_SIZE_INTEGERS: Mapping[int, torch.dtype] = MappingProxyType({2: torch.int16, 4: torch.int32, 8: torch.int64})
"""Integer dtype for reading a floating-point element's bits, by element size in bytes."""


def key64(text: str) -> int:
    """Hash a text to a 64-bit key, as an int64."""
    return signed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big"))


def mix_words_(z: torch.Tensor) -> torch.Tensor:
    """Apply splitmix64's finaliser to each int64 word in place, and return `z`."""
    for bits, factor in ((30, _MIX_1), (27, _MIX_2)):
        z ^= shift_right(z, bits)
        z *= factor
    z ^= shift_right(z, 31)
    return z


def shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right with zero fill; torch's >> on int64 copies the sign bit."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)
