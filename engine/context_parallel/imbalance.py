"""The imbalance of attention work among the ranks that share rows.

Each gather waits for the slowest rank, so a microbatch takes as long as its rank with the most work:

    imbalance    largest work of a rank / mean work of a rank, each summed over the microbatches; at least 1

Work is the number of (query, key) pairs of a rank over all layers (`triaxis.engine.context_parallel.deal.rank_work`). Rows of one
document are exactly balanced.
"""

from collections.abc import Sequence

from triaxis.engine.context_parallel.deal import Windows, rank_work
from triaxis.engine.data.document_statistics import DocumentStatistics


def work_of_ranks(rows: Sequence[Sequence[int]], size: int, windows: Windows) -> tuple[int, ...]:
    """Count the (query, key) pairs of each of `size` ranks in rows, given as lengths of their documents."""
    return tuple(map(sum, zip(*(rank_work(row, size, windows) for row in rows), strict=True)))


def imbalance(microbatches: Sequence[Sequence[int]]) -> float:
    """Compute the imbalance of microbatches, each given as the work of its ranks."""
    return sum(map(max, microbatches)) * len(microbatches[0]) / sum(map(sum, microbatches))


def predicted_imbalance(documents: DocumentStatistics, micro_batch_size: int, size: int, windows: Windows) -> float:
    """Predict the imbalance from the documents of the first steps, over all replicas."""
    rows = documents.rows()
    starts = range(0, len(rows), micro_batch_size)
    return imbalance([work_of_ranks(rows[start : start + micro_batch_size], size, windows) for start in starts])
