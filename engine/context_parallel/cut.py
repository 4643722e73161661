"""Cuts a context-parallel rank's part from a microbatch's rows, on the host.

    tokens, labels, loss_mask, position_ids, ahead, mask_ahead   [.., s] -> [.., s/c], this rank's runs in each row

A run is a range of tokens, and `ahead` holds multi-token prediction's further labels. Labels are shifted before the cut. All cp
ranks in a replica read the same samples. A document may span several ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from triaxis.engine.config.quantities.context_parallel import gathers_keys
from triaxis.engine.config.tree import Config
from triaxis.engine.context_parallel.deal import Windows, even_runs, runs_of_ranks, windows_of
from triaxis.engine.context_parallel.imbalance import work_of_ranks
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.data.sequence_part import SequencePart
from triaxis.engine.layout.rank_grid import ParallelSizes


@dataclass(frozen=True, slots=True)
class ContextCut:
    """The function that cuts one cp rank's part from a microbatch.

    With a single cp rank it changes nothing.

    Attributes:
        size, index: cp axis size, and this rank's index on it.
        windows: number of layers for each attention window, from which a token's work is computed. None if ranks exchange heads
            (`engine/context_parallel/ulysses.py`): each rank then has one run with s/c tokens.
    """

    size: int
    index: int
    windows: Windows | None

    @classmethod
    def of(cls, config: Config, sizes: ParallelSizes, index: int) -> "ContextCut":
        """Build the function that cuts out the part for cp rank `index`."""
        return cls(sizes.cp, index, windows_of(config.model) if gathers_keys(config) else None)

    def __call__(self, whole: MicroBatch) -> MicroBatch:
        """Extract this rank's part from a microbatch on the CPU.

        The result's `num_tokens` and `num_ahead` (multi-token prediction) count labels in this part only. If rows have documents
        and ranks gather keys, the result's `rank_work` lists each cp rank's attention work. A single cp rank gets `whole` itself.
        """
        b, s = whole.tokens.shape
        rows = ((s,),) * b if whole.documents is None else whole.documents.lengths
        part = self.part(rows)
        if part is None:
            return whole
        work = None
        if whole.documents is not None and self.windows is not None:
            work = work_of_ranks(rows, self.size, self.windows)
        tokens, labels, loss_mask, position_ids = (
            each.gather(1, part.positions) for each in (whole.tokens, whole.labels, whole.loss_mask, whole.position_ids)
        )
        if whole.ahead is not None and whole.mask_ahead is not None:
            index = part.positions.expand(len(whole.ahead), *part.positions.shape)
            ahead, mask_ahead = (each.gather(2, index) for each in (whole.ahead, whole.mask_ahead))
            counts = tuple(int(count) for count in mask_ahead.sum((1, 2)))
            whole = replace(whole, ahead=ahead, mask_ahead=mask_ahead, num_ahead=counts)
        return replace(
            whole,
            tokens=tokens,
            labels=labels,
            loss_mask=loss_mask,
            position_ids=position_ids,
            num_tokens=loss_mask.sum(dtype=torch.float64).item(),
            part=part,
            rank_work=work,
        )

    def part(self, rows: Sequence[Sequence[int]]) -> SequencePart | None:
        """Describe this rank's part of the rows, on the CPU; None if the rank has whole rows.

        Args:
            rows: document lengths, row by row.
        """
        if self.size == 1:
            return None
        runs = [
            even_runs(sum(row), self.size) if self.windows is None else runs_of_ranks(row, self.size, self.windows)
            for row in rows
        ]
        return SequencePart.of(runs, self.index, rows)
