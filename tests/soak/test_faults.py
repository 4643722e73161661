"""Which faults are drawn: all kinds, the same for the same seed."""

import signal
from collections import Counter

import pytest

from tests.soak.faults import EARLIEST, LATEST, WORDS, Kind, draw
from tests.soak.scene import GRID, LAYERS_PER_STAGE, RANKS


@pytest.mark.parametrize("seed", range(20))
def test_thirty_faults_are_of_all_kinds_three_times_and_more(seed: int) -> None:
    faults = draw(seed, 30)
    assert [fault.number for fault in faults] == list(range(1, 31))
    counts = Counter(fault.kind for fault in faults)
    assert set(counts) == set(Kind) and min(counts.values()) >= 3
    asked = {fault.signal for fault in faults if fault.kind is Kind.PREEMPT}
    assert asked == {signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}
    for fault in faults:
        assert fault.rank in RANKS and EARLIEST <= fault.after_steps <= LATEST
        assert fault.layer // LAYERS_PER_STAGE == GRID.coordinates(fault.rank).pp, "a rank has its own layers only"


def test_a_seed_says_all() -> None:
    assert draw(5, 30) == draw(5, 30)
    assert draw(5, 30) != draw(6, 30)
    assert {fault.rank for fault in draw(5, 30)} == set(RANKS)


def test_fewer_faults_than_kinds_differ_and_kinds_can_be_chosen() -> None:
    assert len({fault.kind for fault in draw(2, 4)}) == 4
    assert {fault.kind for fault in draw(2, 5, [Kind.NAN])} == {Kind.NAN}
    assert set(WORDS) == set(Kind)
