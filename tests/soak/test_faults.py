"""Which faults are drawn: all kinds, the same for the same seed."""

import signal
from collections import Counter

import pytest

from tests.soak.faults import EARLIEST, LATEST, WORDS, Kind, draw
from tests.soak.scene import GRID, LAYERS_PER_STAGE, RANKS


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_three_faults_per_kind_are_three_of_each(seed: int) -> None:
    num_faults = 3 * len(Kind)
    faults = draw(seed, num_faults)
    assert [fault.number for fault in faults] == list(range(1, num_faults + 1))
    assert Counter(fault.kind for fault in faults) == dict.fromkeys(Kind, 3)
    for kind in (Kind.PREEMPT, Kind.STOP_IN_VALIDATION):
        asked = {fault.signal for fault in faults if fault.kind is kind}
        assert asked == {signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}
    for fault in faults:
        assert fault.rank in RANKS and EARLIEST <= fault.after_steps <= LATEST
        assert fault.layer // LAYERS_PER_STAGE == GRID.coordinates(fault.rank).pp, "a rank has its own layers only"


def test_a_seed_says_all() -> None:
    assert draw(5, 40) == draw(5, 40)
    assert draw(5, 40) != draw(6, 40)
    assert {fault.rank for fault in draw(5, 40)} == set(RANKS)
    assert min(Counter(fault.kind for fault in draw(5, 40)).values()) >= 2


def test_fewer_faults_than_kinds_differ_and_kinds_can_be_chosen() -> None:
    assert len({fault.kind for fault in draw(2, 4)}) == 4
    assert {fault.kind for fault in draw(2, 5, [Kind.NAN])} == {Kind.NAN}
    assert set(WORDS) == set(Kind)
