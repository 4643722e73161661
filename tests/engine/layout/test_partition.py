"""Layers to stages: every layer once, as even as possible, and problems that name legal values."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from triaxis.engine.layout.partition import partition


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 100), st.integers(1, 8), st.integers(1, 4))
def test_every_layer_is_in_one_stage_and_stages_differ_by_at_most_one(num_layers: int, pp: int, vpp: int) -> None:
    assume(num_layers >= pp * vpp)
    stages = partition(num_layers, pp, vpp)
    assert len(stages) == pp * vpp
    assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
    counts = [len(stage.layers) for stage in stages]
    assert max(counts) - min(counts) <= 1
    num_smaller = sum(count < max(counts) for count in counts)
    assert num_smaller < 1 or counts[-1] == min(counts)
    assert num_smaller < 2 or counts[0] == min(counts)
    assert [stage.has_embedding for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.has_head for stage in stages] == [False] * (len(stages) - 1) + [True]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_a_list_is_taken_as_it_is(counts: list[int]) -> None:
    stages = partition(sum(counts), len(counts), 1, counts)
    assert [len(stage.layers) for stage in stages] == counts
    assert [layer for stage in stages for layer in stage.layers] == list(range(sum(counts)))


@pytest.mark.parametrize(
    ("num_layers", "counts"),
    [(8, [2, 2, 2, 2]), (7, [2, 2, 2, 1]), (6, [1, 2, 2, 1]), (5, [1, 2, 1, 1]), (4, [1, 1, 1, 1])],
)
def test_the_ends_get_fewer_layers_first(num_layers: int, counts: list[int]) -> None:
    assert [len(stage.layers) for stage in partition(num_layers, 2, 2)] == counts


def test_one_stage_holds_everything() -> None:
    (stage,) = partition(3, 1, 1)
    assert stage.layers == range(3) and stage.has_embedding and stage.has_head


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "counts"),
    [(3, 2, 2, None), (4, 2, 1, [2, 1, 1]), (4, 2, 1, [2, 1]), (4, 2, 1, [3, 3]), (4, 2, 1, [5, -1])],
)
def test_a_cut_that_the_rules_refuse_is_never_made(
    num_layers: int, pp: int, vpp: int, counts: list[int] | None
) -> None:
    with pytest.raises(AssertionError):
        partition(num_layers, pp, vpp, counts)
