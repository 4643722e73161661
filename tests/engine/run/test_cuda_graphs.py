"""CUDA graphs: two microbatches that are live at once never share memory, few graphs serve a step, and events are repeated."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triaxis.engine.comm.ledger import Event, Ledger, WaitObserver
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Action
from triaxis.engine.pipeline.lowering import lower
from triaxis.engine.run.cuda_graphs import Ends, Events, places

NAMES = ("1f1b", "gpipe", "interleaved", "zb_h1", "zbv")


def rows(name: str, pp: int, vpp: int, num_microbatches: int) -> list[list[Action]]:
    program = lower(schedules.build(name, pp, vpp, num_microbatches))
    return [[each for each in row if isinstance(each, Action)] for row in program.instructions]


@given(st.sampled_from(NAMES), st.integers(2, 4), st.integers(1, 12))
def test_live_microbatches_have_slots_of_their_own(name: str, pp: int, num_microbatches: int) -> None:
    vpp = 2 if name in ("interleaved", "zbv") else 1
    if name == "interleaved":
        num_microbatches = -(-num_microbatches // pp) * pp
    for row in rows(name, pp, vpp, num_microbatches):
        found = places(row)
        left = [(action.chunk, action.microbatch) for action in row]
        live: dict[int, tuple[int, int]] = {}
        most = 0
        for number, key in enumerate(left):
            slot = found[key].slot
            assert live.setdefault(slot, key) == key
            most = max(most, len(live))
            if key not in left[number + 1 :]:
                del live[slot]
        assert {place.slot for place in found.values()} == set(range(most))


def test_one_pool_and_three_kinds_serve_a_rank_alone() -> None:
    (row,) = rows("1f1b", 1, 1, 6)
    found = places(row)
    assert {place.slot for place in found.values()} == {0}
    assert [place.ends for place in found.values()] == [Ends(first=True), *4 * [Ends()], Ends(last=True)]


def test_a_deferred_gradient_has_ends_of_its_own() -> None:
    order = ["0F0", "0F1", "0I0", "0I1", "0W1", "0F2", "0I2", "0W2", "0W0"]
    found = places([Action.parse(each) for each in order])
    assert [place.ends for place in found.values()] == [
        Ends(first=True, last_deferred=True),
        Ends(first_deferred=True),
        Ends(last=True),
    ]
    assert [place.slot for place in found.values()] == [0, 1, 1]


@pytest.mark.parametrize("num_microbatches", [16, 64])
def test_a_longer_step_needs_no_more_graphs(num_microbatches: int) -> None:
    for row in rows("1f1b", 4, 1, num_microbatches):
        assert len(set(places(row).values())) <= 4 + 2


class Heard(WaitObserver):
    """Counts what an observer of calls hears of."""

    def __init__(self) -> None:
        self.waits = 0

    def wait_ends(self) -> None:
        self.waits += 1


def test_repeated_events_have_the_next_numbers() -> None:
    heard = Heard()
    ledger, tensor = Ledger([heard]), torch.zeros(2)

    def call(purpose: str) -> Event:
        return ledger.post("all_reduce", "tp", purpose, tensor, 2)

    before, events = call("before"), Events(ledger)
    with events.recorded():
        inside = call("inside")
        ledger.mark("attention", "mark")
        ledger.wait_ends(inside)
    ledger.wait_ends(before)
    assert heard.waits == 1
    ledger.reset()
    again = call("again")
    events.repeat()
    ledger.wait_ends(again)
    events.repeat()
    call("last")
    assert [(event.phase, event.call, event.purpose) for event in ledger.events] == [
        ("post", 0, "again"),
        ("post", 1, "inside"),
        ("mark", -1, "mark"),
        ("wait", 1, "inside"),
        ("wait", 0, "again"),
        ("post", 2, "inside"),
        ("mark", -1, "mark"),
        ("wait", 2, "inside"),
        ("post", 3, "last"),
    ]
    assert [event.group_call for event in ledger.posted] == [0, 1, 2, 3]
