"""Describes the part of a microbatch's rows that one context-parallel rank holds.

    row of s tokens      0 ............................................ s
    runs of this rank         |-- run --|              |-- run --|              s/c tokens in all

A run is a range of consecutive positions, and c is the number of context-parallel ranks. A rank's local tensors hold its runs'
tokens, in order. `engine/context_parallel/` assigns runs to ranks and gathers the cut tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

TokenRange = tuple[int, int]
"""Positions [start, stop) within a row."""

Rows = Sequence[Sequence[int]]
"""Document lengths in tokens, row by row."""


@dataclass(frozen=True, slots=True, eq=False)
class RowStretch:
    """Consecutive queries in one row, or in all rows, with the keys they see.

    The keys reach from the start of the first query's document to the last query. Within a document, the last query and the last
    key are the same position.

    Attributes:
        row: index of the row; None: all rows, each of which is one document.
        queries: range [start, stop) of the queries in the rank's local tokens.
        keys: range [start, stop) of the keys' positions within the row.
        boundaries: int32 document boundaries among the queries, then among the keys (`cu_seqlens` for varlen kernels); None if
            `row` is None.
        longest: largest number of queries in one document, then largest number of keys.
    """

    row: int | None
    queries: TokenRange
    keys: TokenRange
    boundaries: tuple[torch.Tensor, torch.Tensor] | None
    longest: tuple[int, int]

    @classmethod
    def of(cls, row: int, run: TokenRange, first: int, documents: Sequence[int]) -> "RowStretch":
        """Build the `RowStretch` for one run: consecutive positions that this rank holds in a row.

        The run's positions are the queries. The keys reach from the start of the run's first document to the run's end.

        Args:
            row: index of the row.
            run: range [start, stop) of the run's positions within the row.
            first: index of the run's first token among this rank's local tokens in the row.
            documents: lengths of the row's documents, in tokens.
        """
        start, stop = run
        queries, keys, begin = [0], [0], start
        for end, length in zip(accumulate(documents), documents, strict=True):
            low, high = max(start, end - length), min(stop, end)
            if low < high:
                begin = min(begin, end - length)
                queries.append(queries[-1] + high - low)
                keys.append(keys[-1] + high - (end - length))
        bounds = tuple(torch.tensor(each, dtype=torch.int32) for each in (queries, keys))
        longest = tuple(int(np.diff(each).max()) for each in (queries, keys))
        return cls(row, (first, first + stop - start), (begin, stop), (bounds[0], bounds[1]), (longest[0], longest[1]))


@dataclass(frozen=True, slots=True, eq=False)
class SequencePart:
    """The positions that this rank holds in b rows, and permutations between parts and rows.

    A part is one context-parallel rank's tokens.

    Attributes:
        runs: this rank's runs, ranges of consecutive positions, in each row; the host reads them without waiting for the device.
        positions: each local token's position in its row, int64 [b, s/c].
        to_rows: permutation from parts to rows, int64 [s b]; element i of the flattened rows is element `to_rows[i]` of the ranks'
            concatenated, flattened parts.
        to_parts: inverse permutation, int64 [s b].
        stretches: the runs with the keys they see; a varlen kernel takes one call for each.
    """

    runs: tuple[tuple[TokenRange, ...], ...]
    positions: torch.Tensor
    to_rows: torch.Tensor
    to_parts: torch.Tensor
    stretches: tuple[RowStretch, ...]

    @classmethod
    def of(cls, runs: Sequence[Sequence[Sequence[TokenRange]]], index: int, rows: Rows) -> "SequencePart":
        """Build rank `index`'s `SequencePart`, with all tensors on the CPU.

        Args:
            runs: runs[row][rank] lists the rank's runs, ranges [start, stop) of positions in the row.
            index: this rank's index in the context-parallel group.
            rows: document lengths, row by row.
        """
        b = len(runs)
        # Each row's positions [c, s/c], rank by rank.
        by_row = [np.stack([_positions(of_rank) for of_rank in of_row]) for of_row in runs]
        # Element (slot, row) in the gathered parts is element (position, row) in the rows; dim 0 varies slowest.
        to_parts = (np.stack([places.reshape(-1) for places in by_row], axis=1) * b + np.arange(b)).reshape(-1)
        to_rows = np.empty_like(to_parts)
        to_rows[to_parts] = np.arange(to_parts.size)
        mine = tuple(tuple(of_row[index]) for of_row in runs)
        return cls(
            runs=mine,
            positions=torch.from_numpy(np.stack([places[index] for places in by_row])),
            to_rows=torch.from_numpy(to_rows),
            to_parts=torch.from_numpy(to_parts),
            stretches=tuple(_stretches(mine, rows)),
        )

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "SequencePart":
        """Apply `change` to all tensors, for example to copy them to a device."""
        return replace(
            self,
            positions=change(self.positions),
            to_rows=change(self.to_rows),
            to_parts=change(self.to_parts),
            stretches=tuple(
                replace(
                    each, boundaries=None if (both := each.boundaries) is None else (change(both[0]), change(both[1]))
                )
                for each in self.stretches
            ),
        )


def _stretches(runs: tuple[tuple[TokenRange, ...], ...], rows: Rows) -> Iterator[RowStretch]:
    is_one = all(len(row) == 1 for row in rows) and len(set(runs)) == 1
    for number, (of_row, documents) in enumerate(zip(runs[:1] if is_one else runs, rows, strict=not is_one)):
        first = 0
        for start, stop in of_row:
            length = stop - start
            if is_one:
                yield RowStretch(None, (first, first + length), (0, stop), None, (length, stop))
            else:
                yield RowStretch.of(number, (start, stop), first, documents)
            first += length


def _positions(runs: Sequence[TokenRange]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in runs])
