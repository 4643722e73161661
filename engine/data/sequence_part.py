"""The part of a microbatch's rows that one context-parallel rank holds.

    row of s tokens      0 ............................................ s
    runs of this rank         |-- run --|              |-- run --|              s/c tokens in all

Local tensors have the tokens of the runs, in order. `engine/context_parallel/` deals the runs and gathers what is cut.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

TokenRange = tuple[int, int]
"""Positions [start, stop) of a row."""

Rows = Sequence[Sequence[int]]
"""Lengths of each row's documents."""


@dataclass(frozen=True, slots=True, eq=False)
class RowStretch:
    """A run of one row, or of all rows alike, and the keys of the row from its first document's start to its end.

    Queries are aligned with the last of their document's keys.

    Attributes:
        row: its number; None: all rows, each of one document.
        queries: local tokens [start, stop).
        keys: positions [start, stop) of the row.
        boundaries: int32, of the documents among the queries and among the keys (the `cu_seqlens` of varlen kernels); None: there
            is one document.
        longest: tokens of the longest document among the queries, and among the keys.
    """

    row: int | None
    queries: TokenRange
    keys: TokenRange
    boundaries: tuple[torch.Tensor, torch.Tensor] | None
    longest: tuple[int, int]

    @classmethod
    def of(cls, row: int, run: TokenRange, first: int, documents: Sequence[int]) -> "RowStretch":
        """Build the stretch of a run, whose first local token is `first`, in a row with documents of these lengths."""
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
    """The positions of b rows that this rank holds, and the order of all ranks' parts.

    Attributes:
        runs: of each row; the host reads these without waiting for the device.
        positions: int64 [b, s/c], the place of each local token in its row.
        to_rows: int64 [s b]; of the ranks' parts [c s/c, b] one after the other, element `to_rows[i]` is element i of [s, b].
        to_parts: int64 [s b], the inverse.
        stretches: the same runs as a varlen kernel takes them, one call each.
    """

    runs: tuple[tuple[TokenRange, ...], ...]
    positions: torch.Tensor
    to_rows: torch.Tensor
    to_parts: torch.Tensor
    stretches: tuple[RowStretch, ...]

    @classmethod
    def of(cls, runs: Sequence[Sequence[Sequence[TokenRange]]], index: int, rows: Rows) -> "SequencePart":
        """Build the record of rank `index`, on the CPU.

        Args:
            runs: of each row's ranks.
            index: of this rank.
            rows: lengths of each row's documents.
        """
        b = len(runs)
        # Positions [c, s/c] of each row, rank by rank.
        by_row = [np.stack([_positions(of_rank) for of_rank in of_row]) for of_row in runs]
        # Element (slot, row) of the gathered parts is element (position, row) of the rows, with dim 0 slow.
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
        """Return the same part with changed tensors: pinned, or copied to a device."""
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
