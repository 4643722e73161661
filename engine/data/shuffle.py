"""Random bits and permutations that are a function of a key and of nothing else (no torch here).

    key ("documents", seed, epoch) --sha256--> 128-bit Philox key --> uint64 bits --> stable argsort --> permutation

numpy promises the raw bits of its bit generators for ever, but not what `Generator.permutation` or `integers` make of
them: a run resumed under another numpy would see its data in another order. So only raw bits are used here.
"""

import hashlib
import json

import numpy as np
from numpy.typing import NDArray


def random_bits(count: int, *key: int | str) -> NDArray[np.uint64]:
    """`count` uniform 64-bit numbers, uint64 [count]. A longer call with the same key begins with the same numbers."""
    digest = hashlib.sha256(json.dumps(key).encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(count)


def permutation(count: int, *key: int | str) -> NDArray[np.int64]:
    """A uniformly random order of 0 .. count - 1, int64 [count]; ties of the random bits keep their order."""
    return np.argsort(random_bits(count, *key), kind="stable")
