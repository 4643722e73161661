"""Balanced stages: never worse than even ones, and as good as the best of all cuts where these can be listed."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.layout.balance import balance, even_counts, largest_work
from triaxis.engine.layout.placement import Placement


def ranks(pp: int, vpp: int) -> list[int]:
    placement = Placement(pp, vpp)
    return [placement.rank_of(stage) for stage in range(placement.num_stages)]


def cuts(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """All cuts in which every stage but the last has a layer."""
    if num_stages == 1:
        yield (num_layers,)
        return
    for first in range(1, num_layers + 1):
        yield from ((first, *rest) for rest in cuts(num_layers - first, num_stages - 1))


WORK = st.integers(1, 50)


@settings(max_examples=150, deadline=None)
@given(st.lists(WORK, min_size=1, max_size=9), st.integers(0, 200), st.integers(1, 4))
def test_one_stage_per_rank_is_as_good_as_the_best_cut(layers: list[int], head: int, pp: int) -> None:
    pp = min(pp, len(layers))
    found = largest_work(layers, head, balance(layers, head, ranks(pp, 1)), ranks(pp, 1))
    assert found == min(largest_work(layers, head, cut, ranks(pp, 1)) for cut in cuts(len(layers), pp))


@settings(max_examples=150, deadline=None)
@given(st.integers(4, 11), st.integers(1, 9), st.integers(0, 40), st.sampled_from([(2, 2), (1, 3), (2, 3), (3, 2)]))
def test_equal_layers_in_several_stages_per_rank_are_as_good_as_the_best_cut(
    num_layers: int, work: int, head: int, shape: tuple[int, int]
) -> None:
    layers, on = [work] * max(num_layers, shape[0] * shape[1]), ranks(*shape)
    found = largest_work(layers, head, balance(layers, head, on), on)
    assert found == min(largest_work(layers, head, cut, on) for cut in cuts(len(layers), len(on)))


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 3), st.integers(0, 500))
def test_no_cut_is_worse_than_the_even_one(data: st.DataObject, pp: int, vpp: int, head: int) -> None:
    on = ranks(pp, vpp)
    layers = data.draw(st.lists(WORK, min_size=len(on), max_size=len(on) + 20))
    counts = balance(layers, head, on)
    assert sum(counts) == len(layers) and len(counts) == len(on) and min((*counts[:-1], 1)) == 1
    assert largest_work(layers, head, counts, on) <= largest_work(layers, head, even_counts(len(layers), len(on)), on)


@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (5, 1), (3, 2), (1, 1)])
def test_equal_layers_without_a_head_are_cut_evenly(shape: tuple[int, int]) -> None:
    num_stages = shape[0] * shape[1]
    for num_layers in range(num_stages, 4 * num_stages):
        assert balance([7] * num_layers, 0, ranks(*shape)) == even_counts(num_layers, num_stages)


@pytest.mark.parametrize(
    ("layers", "head", "on", "counts"),
    [
        ([1] * 8, 2, [0, 1, 2, 3], (2, 3, 2, 1)),
        ([1] * 8, 9, [0, 1, 2, 3], (2, 3, 3, 0)),
        # Rank 1 holds the head; in a V it is rank 0.
        ([1] * 8, 2, [0, 1, 0, 1], (2, 2, 3, 1)),
        ([1] * 8, 2, [0, 1, 1, 0], (2, 3, 2, 1)),
        ([4, 1, 1, 1, 1, 4], 0, [0, 1, 2], (1, 4, 1)),
    ],
)
def test_the_picture(layers: Sequence[int], head: int, on: Sequence[int], counts: tuple[int, ...]) -> None:
    assert balance(layers, head, on) == counts
