"""Flat ranges as boxes: every element once, in order, few boxes, each contiguous; what two boxes have in common."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.checkpoint.format.boxes import box_shape, flat_boxes, intersect, within
from triaxis.engine.layout.shard_spec import Box


@st.composite
def boxes(draw: st.DrawFn, dims: int | None = None) -> Box:
    count = draw(st.integers(0, 4)) if dims is None else dims
    starts = [draw(st.integers(0, 5)) for _ in range(count)]
    return tuple((start, start + draw(st.integers(1, 5))) for start in starts)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[Box, int, int]:
    box = draw(boxes())
    numel = math.prod(box_shape(box))
    start = draw(st.integers(0, numel))
    return box, start, draw(st.integers(start, numel))


def elements(box: Box) -> list[tuple[int, ...]]:
    """Global indices of a box's elements in its row-major order."""
    return list(product(*(range(start, stop) for start, stop in box)))


@settings(max_examples=400, deadline=None)
@given(ranges())
def test_a_range_is_covered_exactly_in_order_by_few_contiguous_boxes(case: tuple[Box, int, int]) -> None:
    box, start, stop = case
    inside = elements(box)
    parts = list(flat_boxes(box, start, stop))
    assert len(parts) <= max(1, 2 * len(box) - 1)
    covered = []
    at = start
    for part, begins in parts:
        assert begins == at, "parts follow one another in the range"
        mine = elements(part)
        assert inside[begins : begins + len(mine)] == mine, "a part is contiguous in the range"
        covered += mine
        at += len(mine)
    assert covered == inside[start:stop]


def test_the_picture_of_the_module() -> None:
    assert list(flat_boxes(((0, 4), (8, 12)), 2, 13)) == [
        (((0, 1), (10, 12)), 2),
        (((1, 3), (8, 12)), 4),
        (((3, 4), (8, 9)), 12),
    ]


@pytest.mark.parametrize("dims", [1, 2, 3, 4])
def test_the_bound_is_reached(dims: int) -> None:
    box = ((0, 4),) * dims
    parts = list(flat_boxes(box, 1, 4**dims - 1))
    assert len(parts) == 2 * dims - 1


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 4).flatmap(lambda dims: st.tuples(boxes(dims), boxes(dims))))
def test_an_intersection_is_what_both_hold(pair: tuple[Box, Box]) -> None:
    one, other = pair
    common = intersect(one, other)
    assert common == intersect(other, one)
    assert set(elements(common) if common is not None else []) == set(elements(one)) & set(elements(other))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3).flatmap(lambda dims: st.tuples(boxes(dims), boxes(dims))))
def test_within_selects_the_elements_of_the_inner_box(pair: tuple[Box, Box]) -> None:
    outer, other = pair
    inner = intersect(outer, other)
    if inner is None:
        return
    numbers = torch.arange(math.prod(box_shape(outer))).view(box_shape(outer))
    places = {index: number for number, index in enumerate(elements(outer))}
    assert numbers[within(inner, outer)].flatten().tolist() == [places[index] for index in elements(inner)]


def test_a_range_outside_of_its_box_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="leaves the box"):
        list(flat_boxes(((0, 2),), 0, 3))
