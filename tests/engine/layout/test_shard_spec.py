"""Boxes and their runs: every element once, in row-major order, for any shape and cut."""

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.layout.shard_spec import Init, ParamSpec, box_runs, cut, localize

NORMAL = Init("normal", 1.0)


@st.composite
def shapes_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    box = []
    for size in shape:
        start = draw(st.integers(0, size))
        box.append((start, draw(st.integers(start, size))))
    return shape, tuple(box)


@settings(max_examples=200, deadline=None)
@given(shapes_and_boxes())
def test_runs_are_the_box_in_row_major_order(case: tuple[tuple[int, ...], tuple[tuple[int, int], ...]]) -> None:
    shape, box = case
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    expected = [
        sum(at * stride for at, stride in zip(index, strides, strict=True))
        for index in product(*(range(*bounds) for bounds in box))
    ]
    runs = list(box_runs(shape, box))
    assert [number for start, stop in runs for number in range(start, stop)] == expected
    assert all(start < stop for start, stop in runs)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_kv_heads_are_cut_or_replicated(tp: int) -> None:
    spec = ParamSpec("kv", (2, 4, 3, 5), NORMAL, tp_dim=1)
    records = [localize(spec, tp=tp, tp_index=index, sequence_parallel=False) for index in range(tp)]
    heads = [head for record in records for head in range(*record.box[1])]
    assert heads == sorted(heads)
    assert set(heads) == {0, 1, 2, 3}
    if tp <= 4:
        assert len(heads) == 4
        assert all(record.replicas is None and record.sum_over is None for record in records)
    else:
        assert heads == [0, 0, 1, 1, 2, 2, 3, 3]
        assert all(record.replicas == record.sum_over == "kv_replicas" for record in records)


def test_padded_vocabulary_lies_outside_the_box() -> None:
    spec = ParamSpec("embedding.word.weight", (43, 6), NORMAL, tp_dim=0, padded_size=64)
    records = [localize(spec, tp=8, tp_index=index, sequence_parallel=False) for index in range(8)]
    assert [record.local_shape for record in records] == [(8, 6)] * 8
    assert [record.box_numel for record in records] == [48, 48, 48, 48, 48, 18, 0, 0]
    assert sum(record.box_numel for record in records) == spec.numel


@pytest.mark.parametrize(
    ("partial", "sequence_parallel", "summed"),
    [
        ("never", True, False),
        ("sequence", False, False),
        ("sequence", True, True),
        ("always", False, True),
        ("always", True, True),
    ],
)
def test_which_replicas_hold_partial_gradients(partial: str, sequence_parallel: bool, summed: bool) -> None:
    spec = ParamSpec("norm.weight", (6,), NORMAL, grad_is_partial=partial)  # type: ignore[arg-type]
    record = localize(spec, tp=2, tp_index=1, sequence_parallel=sequence_parallel)
    assert record.replicas == "tp"
    assert record.sum_over == ("tp" if summed else None)


def test_neighbours_share_an_item_when_there_are_too_few() -> None:
    assert [cut(2, 8, index) for index in range(8)] == [(0, 1)] * 4 + [(1, 2)] * 4
    with pytest.raises(AssertionError):
        cut(3, 8, 0)
