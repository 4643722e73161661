"""A used bucket is in its slot, and a step gathers as few as two slots allow."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from triaxis.engine.layout.gather_order import GatherOrder


@pytest.mark.parametrize(("layers", "microbatches"), [(8, 4), (3, 2), (5, 1)])
def test_a_pass_that_turns_back_gathers_all_layers_but_two(layers: int, microbatches: int) -> None:
    order, gathered, alone = GatherOrder(layers, 2), 0, 0
    for _ in range(microbatches):
        for bucket in (*reversed(range(layers)), *range(layers)):
            wanted = order.use(bucket)
            gathered += len(wanted)
            alone += bucket in wanted
    assert gathered == layers + (2 * microbatches - 1) * (layers - 2)
    assert alone == 1, "all but the first gather run under the layer before"


def test_forwards_alone_begin_with_one_gather_that_nothing_hides() -> None:
    order = GatherOrder(6, 2)
    for number in range(3):
        wanted = [order.use(bucket) for bucket in reversed(range(6))]
        assert wanted[0] == [5, 4], number
        assert [len(each) for each in wanted[1:]] == [1, 1, 1, 1, 0]


def test_the_head_is_gathered_into_the_embedding_s_place_when_layers_are_used() -> None:
    order, (head, embedding) = GatherOrder(2, 1), (0, 1)
    assert order.next_of_forward() is None, "the embedding is not there"
    for _ in range(3):
        assert order.use(embedding) == [embedding]
        assert [order.next_of_forward() for _ in range(2)] == [head, None]
        # The forward's use, then the backward's and its layers'.
        assert order.use(head) == order.use(head) == []
        assert order.next_of_forward() is None
    order.clear()
    assert order.use(embedding) == [embedding], "an update has changed it"


@given(st.integers(1, 6), st.integers(1, 3), st.lists(st.integers(0, 5), max_size=40))
def test_a_used_bucket_is_gathered_after_its_slot_had_another(buckets: int, most_slots: int, uses: list[int]) -> None:
    slots = min(most_slots, buckets)
    order, held = GatherOrder(buckets, slots), {}
    for number in uses:
        bucket = number % buckets
        if number == 5:
            order.clear()
            held.clear()
        for each in order.use(bucket):
            assert held.get(each % slots) != each, "nothing is gathered twice"
            held[each % slots] = each
        assert held[bucket % slots] == bucket
