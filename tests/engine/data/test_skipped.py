"""Left-out samples: a step is a function of (consumed samples, skipped ranges), the same in every layout."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.data.sampler import step_sample_ids
from triaxis.engine.data.skipped import SkippedRanges
from triaxis.engine.errors import DataError

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=5).map(
    lambda pairs: [(start, start + length) for start, length in pairs]
)


def kept(ranges: list[tuple[int, int]], count: int) -> list[int]:
    """The definition: the first `count` ids that are in no range."""
    return [n for n in range(count + 120) if not any(start <= n < stop for start, stop in ranges)][:count]


@settings(max_examples=100, deadline=None)
@given(RANGES, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4))
def test_steps_are_the_samples_that_are_left_in_every_layout(
    ranges: list[tuple[int, int]], micro: int, dp: int, num_microbatches: int, step: int
) -> None:
    skipped, batch = SkippedRanges.of(ranges), micro * dp * num_microbatches
    by_rank = [step_sample_ids(step * batch, batch, micro, dp, rank, skipped) for rank in range(dp)]
    dealt = [sample_id for j in range(num_microbatches) for rows in by_rank for sample_id in rows[j]]
    assert dealt == kept(ranges, (step + 1) * batch)[step * batch :]
    (one_rank,) = zip(*step_sample_ids(step * batch, batch, 1, 1, 0, skipped), strict=True)
    assert list(one_rank) == dealt


@settings(max_examples=100, deadline=None)
@given(RANGES, RANGES, st.integers(0, 60))
def test_what_lies_ahead_may_be_left_out_later(
    ranges: list[tuple[int, int]], more: list[tuple[int, int]], consumed: int
) -> None:
    before = SkippedRanges.of(ranges)
    after = before.with_(more)
    assert after == SkippedRanges.of([*more, *ranges]), "in any order"
    same = before.ids(0, consumed) == after.ids(0, consumed)
    assert after.keeps_past_of(before, consumed) == same
    ahead = before.id_at(consumed)
    assert before.with_([(ahead, ahead + 3)]).keeps_past_of(before, consumed)


@settings(max_examples=50, deadline=None)
@given(RANGES, st.integers(0, 30), st.integers(1, 8))
def test_leaving_out_the_span_of_a_step_leaves_out_its_samples_alone(
    ranges: list[tuple[int, int]], position: int, count: int
) -> None:
    skipped = SkippedRanges.of(ranges)
    bad = skipped.ids(position, count)
    after = skipped.with_([skipped.span(position, count)])
    assert after.ids(0, 40) == [n for n in skipped.ids(0, 40 + count) if n not in bad][:40]


@pytest.mark.parametrize("ranges", [[(3, 3)], [(-1, 2)], [(5, 4)]])
def test_a_range_that_is_none_is_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(DataError, match="id after the last"):
        SkippedRanges.of(ranges)
