"""Assigns a step's samples to ranks, by arithmetic on consumed samples and skipped ranges.

    global batch 8, micro batch 2, dp 2, 24 samples consumed:      ids 24 .. 31 are the step, in every layout

                     dp rank 0    dp rank 1
    microbatch 0      24 25        26 27          id = consumed + (j * dp + r) * micro + k
    microbatch 1      28 29        30 31               for row k of microbatch j of dp rank r

With skipped id ranges, `engine/data/skipped.py` maps these numbers to ids. Tensor- and pipeline-parallel ranks that share a dp rank
read the same ids. Another dp size or micro batch only distributes a step's ids differently.
"""

from triaxis.engine.data.skipped import SkippedRanges

NOTHING_SKIPPED = SkippedRanges()


def step_sample_ids(
    consumed_samples: int,
    global_batch_size: int,
    micro_batch_size: int,
    dp: int,
    dp_rank: int,
    skipped: SkippedRanges = NOTHING_SKIPPED,
) -> list[list[int]]:
    """List one dp rank's sample ids for the step after `consumed_samples`.

    Returns:
        num_microbatches lists with micro_batch_size ids each, in training order.
    """
    num_microbatches, rest = divmod(global_batch_size, micro_batch_size * dp)
    assert num_microbatches > 0 and rest == 0, "some samples of a step would be read by no rank"
    assert consumed_samples >= 0 and 0 <= dp_rank < dp, f"sample {consumed_samples}, dp rank {dp_rank} of {dp}"
    starts = (consumed_samples + (j * dp + dp_rank) * micro_batch_size for j in range(num_microbatches))
    return [skipped.ids(start, micro_batch_size) for start in starts]
