"""Draws random bits and permutations that depend on a key alone.

    key ("documents", seed, epoch) --sha256--> 128-bit Philox key --> high bits | index --> sorted --> indices

Only raw bits are used, because numpy guarantees them across versions. With `Generator.permutation` or `integers`, a run resumed
under another numpy version could see its data in another order.
"""

import hashlib
import json

import numpy as np
from numpy.typing import NDArray

PER_COUNT = 4
"""Numbers that Philox generates per counter value."""
DRAWN_AT_ONCE = 2**20
"""Numbers drawn per call, a few milliseconds; numpy holds Python's lock meanwhile, so a larger call would delay training."""


def random_bits(count: int, *key: int | str, skip: int = 0) -> NDArray[np.uint64]:
    """Draw uniform 64-bit numbers, uint64 [count].

    A longer call with the same key begins with the same numbers.

    Args:
        count: length of the result.
        key: values that seed the generator.
        skip: index of the first number within the key's sequence, a multiple of `PER_COUNT`.
    """
    assert skip % PER_COUNT == 0, skip
    digest = hashlib.sha256(json.dumps(key).encode()).digest()
    source = np.random.Philox(key=int.from_bytes(digest[:16], "little"), counter=skip // PER_COUNT)
    bits = np.empty(count, np.uint64)
    for start in range(0, count, DRAWN_AT_ONCE):
        bits[start : start + DRAWN_AT_ONCE] = source.random_raw(min(DRAWN_AT_ONCE, count - start))
    return bits


def permutation(count: int, *key: int | str) -> NDArray[np.int64]:
    """Shuffle 0 .. count - 1 uniformly, int64 [count].

    Each index gets a random number, and the indices are sorted by their numbers. An index replaces its number's low bits. All
    numbers then differ, so every sorting algorithm gives the same order.
    """
    index_bits = np.uint64(max(count - 1, 0).bit_length())
    numbers = (random_bits(count, *key) >> index_bits << index_bits) | np.arange(count, dtype=np.uint64)
    numbers.sort()
    return (numbers & ((np.uint64(1) << index_bits) - np.uint64(1))).astype(np.int64)
