"""A step is a range of sample ids, in every layout."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.data.sampler import step_sample_ids


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**12), st.integers(1, 8), st.integers(1, 8), st.integers(1, 6))
def test_the_ranks_together_read_the_range(consumed: int, micro: int, dp: int, num_microbatches: int) -> None:
    batch = micro * dp * num_microbatches
    by_rank = [step_sample_ids(consumed, batch, micro, dp, rank) for rank in range(dp)]
    for microbatches in by_rank:
        assert [len(ids) for ids in microbatches] == [micro] * num_microbatches
    # In the order microbatch, rank, row, the ids are the range itself: each id once, none from elsewhere.
    dealt = [sample_id for j in range(num_microbatches) for microbatches in by_rank for sample_id in microbatches[j]]
    assert dealt == list(range(consumed, consumed + batch))


def test_the_picture_in_the_docstring() -> None:
    assert step_sample_ids(24, 8, 2, 2, 0) == [[24, 25], [28, 29]]
    assert step_sample_ids(24, 8, 2, 2, 1) == [[26, 27], [30, 31]]


@pytest.mark.parametrize(
    "arguments",
    [(0, 9, 2, 2, 0), (0, 0, 1, 1, 0), (-1, 8, 2, 2, 0), (0, 8, 2, 2, 2), (0, 8, 2, 2, -1)],
)
def test_what_does_not_divide_is_refused(arguments: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(AssertionError):
        step_sample_ids(*arguments)
