"""Computes how unevenly attention work is spread over the ranks that share rows.

    imbalance    largest work per rank / mean work per rank, each summed over microbatches; at least 1

A rank's work is its count of (query, key) pairs over all layers (`triaxis.engine.context_parallel.deal.rank_work`). Each gather
waits for the rank with the most work.
"""

from collections.abc import Sequence

from triaxis.engine.context_parallel.deal import Windows, rank_work
from triaxis.engine.data.document_statistics import DocumentStatistics


def work_of_ranks(rows: Sequence[Sequence[int]], size: int, windows: Windows) -> tuple[int, ...]:
    """Count each rank's (query, key) pairs over all layers, summed over rows of document lengths."""
    return tuple(map(sum, zip(*(rank_work(row, size, windows) for row in rows), strict=True)))


def imbalance(microbatches: Sequence[Sequence[int]]) -> float:
    """Divide the sum of the microbatches' largest work by the sum of their mean work.

    Each microbatch is the list of its ranks' work.
    """
    return sum(map(max, microbatches)) * len(microbatches[0]) / sum(map(sum, microbatches))


def predicted_imbalance(documents: DocumentStatistics, micro_batch_size: int, size: int, windows: Windows) -> float:
    """Predict `imbalance`: the largest cp rank's attention work divided by the mean.

    The prediction covers all replicas' microbatches in the steps of `documents`.
    """
    rows = documents.rows()
    starts = range(0, len(rows), micro_batch_size)
    return imbalance([work_of_ranks(rows[start : start + micro_batch_size], size, windows) for start in starts])
