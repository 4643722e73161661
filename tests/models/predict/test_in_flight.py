"""Moments of a rank at which it holds the most: as a walk over all of its actions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.pipeline.actions import Kind
from triaxis.engine.pipeline.schedules import build
from triaxis.models.predict.in_flight import peaks_of

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("interleaved", 3), ("zbv", 2)]


@pytest.mark.parametrize(("name", "vpp"), SCHEDULES)
@settings(max_examples=20, deadline=None)
@given(pp=st.integers(2, 4), num_microbatches=st.integers(1, 9), data=st.data())
def test_peaks_hold_as_much_as_any_moment(
    name: str, vpp: int, pp: int, num_microbatches: int, data: st.DataObject
) -> None:
    row = data.draw(st.sampled_from(build(name, pp, vpp, num_microbatches).actions))
    chunks = data.draw(st.sampled_from([tuple(range(vpp)), (0,) * vpp, (*(0,) * (vpp - 1), vpp > 1)]))
    sizes = st.integers(0, 50)
    kept, deferred, during = (data.draw(st.lists(sizes, min_size=vpp, max_size=vpp)) for _ in range(3))
    live = most = 0
    for action in row:
        stage = chunks[action.chunk]
        if action.kind is Kind.W:
            live -= deferred[stage]
            continue
        live -= 0 if action.kind is Kind.F else kept[stage]
        most = max(most, live + during[stage] * (1 + (action.kind is Kind.F)))
        live += {Kind.F: kept[stage], Kind.I: deferred[stage], Kind.B: 0}[action.kind]
    beside = (
        sum(count * held for count, held in zip(peak.kept, kept, strict=False))
        + sum(count * held for count, held in zip(peak.deferred, deferred, strict=False))
        + during[peak.stage] * (1 + (peak.kind is Kind.F))
        for peak in peaks_of(row, chunks)
    )
    assert max(beside) == most


def test_a_long_step_has_no_more_peaks_than_a_short_one() -> None:
    short, long = (peaks_of(build("1f1b", 4, 1, m).actions[0], (0,)) for m in (8, 100))
    assert short == long
    assert {(peak.kind, peak.kept) for peak in short} == {(Kind.F, (3,)), (Kind.B, (3,))}
