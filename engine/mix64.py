"""A 64-bit hash of counters on any device: splitmix64's finaliser (Steele, Lea, Flood, "Fast splittable pseudorandom
number generators", 2014).

Torch has no unsigned 64-bit arithmetic, so words are int64 with the same bits; products and sums wrap. NumPy has it, and
needs half the time for it on a CPU: where many gigabytes are hashed there, `fold64_array_` does what `fold64_` does.
"""

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_WORD = 1 << 64
_SIGN = 1 << 63


def signed(word: int) -> int:
    """A 64-bit pattern as the int64 that torch stores."""
    return (word + _SIGN) % _WORD - _SIGN


def unsigned(word: int) -> int:
    """The 64-bit pattern of an int64."""
    return word % _WORD


GOLDEN = signed(0x9E3779B97F4A7C15)
"""Counters are multiplied by it before they are mixed."""

_MIX_1 = signed(0xBF58476D1CE4E5B9)
_MIX_2 = signed(0x94D049BB133111EB)
_FOLD_BITS = 32
_FOLD_SHIFT, _FOLD_FACTOR = np.uint64(_FOLD_BITS), np.uint64(unsigned(_MIX_1))


def key64(text: str) -> int:
    """A 64-bit key of a text, as an int64."""
    return signed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big"))


def mix64_(z: torch.Tensor) -> torch.Tensor:
    """Mix int64 words, in place; returns `z`."""
    for bits, factor in ((30, _MIX_1), (27, _MIX_2)):
        z ^= shift_right(z, bits)
        z *= factor
    z ^= shift_right(z, 31)
    return z


Words = NDArray[np.uint64]


def words(values: Any) -> Words:
    """Numbers, or one number, as 64-bit patterns."""
    return np.atleast_1d(np.asarray(values)).astype(np.int64).view(np.uint64)


def fold64_(z: torch.Tensor) -> torch.Tensor:
    """One round of multiply and fold: a bijection, and a third of the work of `mix64_`; in place, returns `z`."""
    z *= _MIX_1
    z ^= shift_right(z, _FOLD_BITS)
    return z


def fold64_array_(z: Words, spare: Words) -> None:
    """`fold64_` of uint64 words, in place; `spare` is a buffer of the same length."""
    np.multiply(z, _FOLD_FACTOR, out=z)
    np.right_shift(z, _FOLD_SHIFT, out=spare)
    np.bitwise_xor(z, spare, out=z)


def shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; torch's >> on int64 copies the sign."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)
