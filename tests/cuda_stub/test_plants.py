"""Each wait that the engine's order of streams has is taken out once: an order sees it, or nothing needs it."""

import re

import pytest

from tests.cuda_stub.in_order import ORDERS, at_once, run_layout
from tests.cuda_stub.plants import NEEDLESS, PLANTS
from tests.harness import RankFailedError

IN_CI = ("off1: freed before the copy",)

NAMED = r"DivergenceError|cannot convert float NaN to integer|upper bound and lower bound|died with exit code 70"
"""What ends a rank that went on with wrong numbers; 70: an operator whose result would have a negative size."""


def is_seen(name: str, order: str) -> bool:
    layout = (PLANTS | NEEDLESS)[name][0]
    try:
        return run_layout(layout, order, name) != at_once(layout)
    except RankFailedError as error:
        assert re.search(NAMED, str(error)), error
        return True


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.slow) for name in PLANTS]
)
def test_an_order_sees_what_is_taken_out(name: str) -> None:
    assert any(is_seen(name, order) for order in ORDERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDLESS)
def test_nothing_needs_what_something_else_ensures(name: str) -> None:
    assert not any(is_seen(name, order) for order in ORDERS)
