"""The cut of a microbatch along its rows, made once, on the host, after labels were shifted.

    tokens, labels, loss_mask, position_ids  [b, s]  ->  [b, s/c]: the runs of this rank, row by row; tokens ahead likewise

Documents stay whole: masks come from positions in the row. Every cp rank of a replica reads the same samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from triaxis.engine.config.context_parallel import gathers_keys
from triaxis.engine.config.tree import Config
from triaxis.engine.context_parallel.deal import Windows, even_runs, runs_of_ranks, windows_of
from triaxis.engine.context_parallel.imbalance import work_of_ranks
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.data.sequence_part import SequencePart
from triaxis.engine.layout.rank_grid import ParallelSizes


@dataclass(frozen=True, slots=True)
class ContextCut:
    """The cut of one cp rank; at size 1 a microbatch stays as it is.

    Attributes:
        size, index: of the cp axis, and this rank's place on it.
        windows: of the model's layers, on which the weight of a token depends; None: each rank has one run of s/c tokens,
            since all heads' attention is shared alike (`engine/context_parallel/ulysses.py`).
    """

    size: int
    index: int
    windows: Windows | None

    @classmethod
    def of(cls, config: Config, sizes: ParallelSizes, index: int) -> "ContextCut":
        """Return the cut of a rank of a run."""
        return cls(sizes.cp, index, windows_of(config.model) if gathers_keys(config) else None)

    def __call__(self, whole: MicroBatch) -> MicroBatch:
        """Return this rank's part of a microbatch on the CPU."""
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
            num_tokens=int(loss_mask.sum()),
            part=part,
            rank_work=work,
        )

    def part(self, rows: Sequence[Sequence[int]]) -> SequencePart | None:
        """Return this rank's part of rows with these lengths of documents, on the CPU; None: it has all of them."""
        if self.size == 1:
            return None
        runs = [
            even_runs(sum(row), self.size) if self.windows is None else runs_of_ranks(row, self.size, self.windows)
            for row in rows
        ]
        return SequencePart.of(runs, self.index, rows)
