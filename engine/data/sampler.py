"""Which samples a rank reads in a step: pure arithmetic on consumed samples and skipped ranges (no torch here).

    global batch 8, micro batch 2, dp 2, 24 samples consumed:      ids 24 .. 31 are the step, in every layout

                     dp rank 0    dp rank 1
    microbatch 0      24 25        26 27          id = consumed + (j * dp + r) * micro + k
    microbatch 1      28 29        30 31               for row k of microbatch j of dp rank r

Where ranges of ids are left out, the picture is one of positions, each with its id (`engine/data/skipped.py`). Tensor- and
pipeline-parallel ranks of one dp rank read the same ids. Nothing else decides what is in a step: dp, the micro batch and restarts
only deal the same ids out differently.
"""

from engine.data.skipped import SkippedRanges
from engine.errors import DataError

NOTHING_SKIPPED = SkippedRanges()


def step_sample_ids(
    consumed_samples: int,
    global_batch_size: int,
    micro_batch_size: int,
    dp: int,
    dp_rank: int,
    skipped: SkippedRanges = NOTHING_SKIPPED,
) -> list[list[int]]:
    """The sample ids of one dp rank in the step that begins after `consumed_samples`.

    Returns:
        num_microbatches lists of micro_batch_size ids, in the order in which they are trained on.

    Raises:
        DataError: the global batch does not divide into whole microbatches for all dp ranks, or the rank is none.
    """
    if min(global_batch_size, micro_batch_size, dp) < 1 or global_batch_size % (micro_batch_size * dp):
        raise DataError(
            f"train.global_batch_size = {global_batch_size} does not divide into microbatches of {micro_batch_size} samples for "
            f"dp = {dp} ranks: {global_batch_size} % ({micro_batch_size} x {dp}) must be 0, or some samples of a step would be "
            f"read by no rank. Use a multiple of {max(1, micro_batch_size * dp)}."
        )
    if consumed_samples < 0 or not 0 <= dp_rank < dp:
        raise DataError(
            f"consumed_samples = {consumed_samples} and dp_rank = {dp_rank} of dp = {dp}: counts start at 0, ranks end at dp - 1."
        )
    num_microbatches = global_batch_size // (micro_batch_size * dp)
    starts = (consumed_samples + (j * dp + dp_rank) * micro_batch_size for j in range(num_microbatches))
    return [skipped.ids(start, micro_batch_size) for start in starts]
