"""The samples of a rank in a step: pure arithmetic on consumed samples and skipped ranges.

    global batch 8, micro batch 2, dp 2, 24 samples consumed:      ids 24 .. 31 are the step, in every layout

                     dp rank 0    dp rank 1
    microbatch 0      24 25        26 27          id = consumed + (j * dp + r) * micro + k
    microbatch 1      28 29        30 31               for row k of microbatch j of dp rank r

Where ranges of ids are skipped, the numbers are positions, each with its id (`engine/data/skipped.py`). Tensor- and
pipeline-parallel ranks of one dp rank read the same ids. The dp size, the micro batch and restarts only distribute the ids of a
step differently.
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
    """Return the sample ids of one dp rank in the step after `consumed_samples`.

    Returns:
        num_microbatches lists of micro_batch_size ids, in the order of training.
    """
    num_microbatches, rest = divmod(global_batch_size, micro_batch_size * dp)
    assert num_microbatches > 0 and rest == 0, "some samples of a step would be read by no rank"
    assert consumed_samples >= 0 and 0 <= dp_rank < dp, f"sample {consumed_samples}, dp rank {dp_rank} of {dp}"
    starts = (consumed_samples + (j * dp + dp_rank) * micro_batch_size for j in range(num_microbatches))
    return [skipped.ids(start, micro_batch_size) for start in starts]
