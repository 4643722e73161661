"""The documents of a microbatch: which tokens of a row may attend to each other.

    row of s tokens   | ... doc 7 | doc 2 ........... | doc 9 ... |      documents follow each other without padding
    lengths           |     3     |        12         |     9     |      their sum is s
    positions           0  1  2     0  1  ...    11     0  1  ...        with `data.positions: document`

Boundaries come from the lengths in the corpus' index, never from token values: an end-of-document token may be part of a text.
A document that began in the sample before starts anew here, since none of its earlier tokens is in the sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

BOUNDARIES_MULTIPLE = 64
"""Boundaries are padded to a multiple of this, so that their tensor has few shapes."""


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The documents of b rows of s tokens each.

    Attributes:
        lengths: of each row's documents in order, all above 0; the host reads these without waiting for the device.
        boundaries: int32 [n], the first token of each document in the flattened [b, s], then b s up to n (the `cu_seqlens` of
            varlen kernels; an empty document at the end costs nothing).
        numbers: int32 [b, s], the number of each token's document in its row; equal numbers see each other.
    """

    lengths: tuple[tuple[int, ...], ...]
    boundaries: torch.Tensor
    numbers: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]]) -> "Documents":
        """Build the record of rows with these document lengths, on the CPU. Every row has the same sum."""
        rows = tuple(tuple(row) for row in lengths)
        ends = np.cumsum([length for row in rows for length in row])
        used = 1 + len(ends)
        boundaries = np.full(-(-used // BOUNDARIES_MULTIPLE) * BOUNDARIES_MULTIPLE, ends[-1], np.int32)
        boundaries[0] = 0
        boundaries[1:used] = ends
        numbers = np.stack([np.repeat(np.arange(len(row), dtype=np.int32), row) for row in rows])
        return cls(rows, torch.from_numpy(boundaries), torch.from_numpy(numbers))

    @property
    def longest(self) -> int:
        """Return the length of the longest document, in tokens."""
        return max(max(row) for row in self.lengths)

    @property
    def is_one_per_row(self) -> bool:
        """Return whether every row is one document, so that a causal mask alone is right."""
        return all(len(row) == 1 for row in self.lengths)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Documents":
        """Return the same documents with changed tensors: pinned, or copied to a device."""
        return replace(self, boundaries=change(self.boundaries), numbers=change(self.numbers))


def document_positions(lengths: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return int64 [s]: positions of one row that start from 0 in each of its documents."""
    return np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
