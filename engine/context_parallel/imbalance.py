"""Unequal attention work of the ranks that share rows (no torch here).

Each gather waits for the rank that comes last, so a microbatch takes as long as its fullest rank:

    imbalance    keys of each microbatch's fullest rank / keys of its mean rank, both summed over the microbatches; at least 1

Keys are those that a rank's queries see, over all layers together (`triaxis.engine.context_parallel.deal.rank_work`). Rows of
one document are dealt by head and tail, and are exactly balanced.
"""

from collections.abc import Sequence

from triaxis.engine.context_parallel.deal import Windows, rank_work
from triaxis.engine.data.document_statistics import DocumentStatistics


def work_of_ranks(rows: Sequence[Sequence[int]], size: int, windows: Windows) -> tuple[int, ...]:
    """Return the keys that the queries of each of `size` ranks see in rows with these lengths of documents."""
    return tuple(map(sum, zip(*(rank_work(row, size, windows) for row in rows), strict=True)))


def imbalance(microbatches: Sequence[Sequence[int]]) -> float:
    """Return the imbalance of microbatches, each given as the keys of its ranks."""
    return sum(map(max, microbatches)) * len(microbatches[0]) / sum(map(sum, microbatches))


def predicted_imbalance(documents: DocumentStatistics, micro_batch_size: int, size: int, windows: Windows) -> float:
    """Return the imbalance of the microbatches of the first steps' documents, of all replicas."""
    rows = documents.rows()
    starts = range(0, len(rows), micro_batch_size)
    return imbalance([work_of_ranks(rows[start : start + micro_batch_size], size, windows) for start in starts])
