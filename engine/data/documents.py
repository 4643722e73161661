"""Describes a microbatch's documents, which decide which tokens may attend to each other.

    row of s tokens   | ... doc 7 | doc 2 ........... | doc 9 ... |      documents follow each other without padding
    lengths           |     3     |        12         |     9     |      their sum is s
    positions           0  1  2     0  1  ...    11     0  1  ...        with `data.positions: document`

Boundaries come from the corpus index, never from token values, since an end-of-document token may be part of a text. A document
that began in the previous sample starts at position 0 here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

FEWEST_BOUNDARIES = 8
"""The length of `Documents.boundaries` is a power of two, at least this one, so that the tensor has few distinct shapes."""


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The documents in b rows with s tokens each.

    Attributes:
        rows: document lengths in tokens, row by row, all above 0, in host memory; None: the host does not know them (`unread`).
        boundaries: index of each document's first token in the flattened [b, s], int32 [n], padded with b s; `cu_seqlens` for
            varlen kernels.
        numbers: each token's document number within its row, int32 [b, s]; tokens with equal numbers see each other.
    """

    rows: tuple[tuple[int, ...], ...] | None
    boundaries: torch.Tensor
    numbers: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]], num_boundaries: int = 0) -> "Documents":
        """Build the CPU tensors for rows with these document lengths, with at least `num_boundaries` boundaries.

        Every row must have the same sum.
        """
        rows = tuple(tuple(row) for row in lengths)
        ends = np.cumsum([length for row in rows for length in row])
        boundaries = np.full(max(num_boundaries, padded_boundaries(len(ends))), ends[-1], np.int32)
        boundaries[0] = 0
        boundaries[1 : 1 + len(ends)] = ends
        numbers = np.stack([np.repeat(np.arange(len(row), dtype=np.int32), row) for row in rows])
        return cls(rows, torch.from_numpy(boundaries), torch.from_numpy(numbers))

    @property
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """Document lengths in tokens, row by row.

        Raises:
            RuntimeError: the host does not know them.
        """
        if self.rows is None:
            raise RuntimeError("the host reads documents' lengths, which differ between microbatches")
        return self.rows

    @property
    def longest(self) -> int:
        """Bound on a document's length, in tokens: the longest one's, or a row's if the host does not know the lengths."""
        return self.numbers.shape[1] if self.rows is None else max(map(max, self.rows))

    @property
    def is_one_per_row(self) -> bool:
        """Whether every row is known to be a single document, so a plain causal mask is enough."""
        return self.rows is not None and all(len(row) == 1 for row in self.rows)

    def unread(self) -> "Documents":
        """Return these documents without what differs on the host between microbatches: a CUDA graph of one serves another."""
        return replace(self, rows=None)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Documents":
        """Apply `change` to `boundaries` and `numbers`, for example to copy them to a device."""
        return replace(self, boundaries=change(self.boundaries), numbers=change(self.numbers))


def padded_boundaries(num_documents: int) -> int:
    """Compute the length of `Documents.boundaries`."""
    return max(FEWEST_BOUNDARIES, 1 << num_documents.bit_length())


def document_positions(lengths: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Number one row's tokens from 0 within each document, int64 [s]."""
    return np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
