"""Streams executed late, early and in drawn orders: what the engine orders by waits and events does not change."""

import math

import pytest
import torch

from tests.cuda_stub.in_order import LAYOUTS, ORDERS, at_once, run_layout
from tests.cuda_stub.values import executed

IN_CI = [("offload", "late"), ("zero 3", "1")]


def sums(order: str, *, waits: bool, keeps: bool) -> list[float]:
    """Sum 1000 equal numbers in a side stream, four times, while their memory is given to others."""
    side, found = torch.cuda.Stream(), []
    with executed(order):
        for number in range(4):
            x = torch.full((1000,), number + 1.0, device="cuda")
            x *= 3
            if waits:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                total = x.sum()
            if keeps:
                x.record_stream(side)
            del x
            torch.full((1000,), 7.0, device="cuda")
            side.synchronize()
            found.append(total.item())
    return found


def test_a_wait_and_a_record_of_the_stream_are_needed_and_enough() -> None:
    right = [3000.0, 6000.0, 9000.0, 12000.0]
    assert all(sums(order, waits=True, keeps=True) == right for order in ORDERS)
    without_wait = [order for order in ORDERS if sums(order, waits=False, keeps=True) != right]
    without_record = [order for order in ORDERS if sums(order, waits=True, keeps=False) != right]
    assert "early" in without_wait and "late" in without_record
    assert set(without_wait) & set("12345") and set(without_record) & set("12345")


def test_new_and_freed_memory_is_nan_in_its_streams_turn() -> None:
    with executed("late"):
        x = torch.ones(1000, device="cuda")
        at = x.data_ptr()
        del x
        again = torch.empty(1000, device="cuda")
        pinned = torch.empty(1000, pin_memory=True)
        assert again.data_ptr() == at and math.isnan(again[0].item()) and math.isnan(pinned[0])


def test_a_card_goes_on_without_its_host_and_who_asks_for_an_event_gets_it() -> None:
    with executed("late"):
        torch.ones(1000, device="cuda")
        event = torch.cuda.Event()
        event.record()
        assert not event.query()
        while not event.query():
            pass


CASES = [
    pytest.param(name, order, marks=[] if (name, order) in IN_CI else pytest.mark.slow)
    for name in LAYOUTS
    for order in ORDERS
]


@pytest.mark.parametrize(("name", "order"), CASES)
def test_a_layout_finds_the_same_in_every_order(name: str, order: str) -> None:
    assert run_layout(name, order) == at_once(name)
