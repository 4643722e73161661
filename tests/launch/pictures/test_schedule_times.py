"""A step's waits and its critical path: by hand, and by what must hold for any costs."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Action, Schedule
from triaxis.engine.pipeline.lowering import Transfer, feeding_transfer
from triaxis.engine.pipeline.simulate import Costs, SimulatedTimeline, simulate
from triaxis.launch.pictures.schedule_times import critical_path, rank_waits

TIMES = st.floats(0, 8, allow_subnormal=False).map(lambda time: round(time, 2))


@st.composite
def some_schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "forward_only"]))
    vpp = draw(st.integers(2, 3)) if name == "interleaved" else 2 if name == "zbv" else 1
    return schedules.build(name, draw(st.integers(1, 5)), vpp, draw(st.integers(1, 9)))


@st.composite
def some_costs(draw: st.DrawFn, schedule: Schedule) -> Costs:
    num_stages = schedule.placement.num_stages
    times = st.lists(TIMES, min_size=num_stages, max_size=num_stages)
    return Costs(draw(times), draw(times), draw(times), draw(st.just(0.0) | st.floats(1, 4)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_for_any_costs(data: st.DataObject) -> None:
    """Actions and waits add up to the span, instant messages cost nothing; the path is as long as the span."""
    schedule = data.draw(some_schedules())
    costs = data.draw(some_costs(schedule))
    timeline = simulate(schedule, costs)
    for rank, waits in enumerate(rank_waits(timeline)):
        assert timeline.busy(rank) + sum(waits) == pytest.approx(timeline.span)
        assert waits.messages == 0 or costs.transfer > 0
    assert_path(timeline, costs)


def assert_path(timeline: SimulatedTimeline, costs: Costs) -> None:
    path = critical_path(timeline)
    if timeline.span == 0:
        assert not path
        return
    assert path[0].start == 0 and path[-1].end == timeline.span
    assert all(before.end == after.start and before.start < before.end for before, after in pairwise(path))
    real = {(rank, each.action): each for rank, row in enumerate(timeline.intervals) for each in row}
    transfers = {feeding_transfer(timeline.schedule, rank, action) for rank, action in real}
    for piece in path:
        if isinstance(piece.what, Action):
            assert (piece.start, piece.end) == real[piece.rank, piece.what][1:]
        else:
            assert piece.end - piece.start == pytest.approx(costs.transfer)
            assert piece.what in transfers and piece.rank == piece.what.source


def test_by_hand() -> None:
    """A transfer of 2 that arrives during an action is hidden; one that nothing hides is waited for."""
    timeline = simulate(schedules.one_f_one_b(2, 2), Costs.uniform(2, 3, 2, 1, 2))
    rows = [[(str(each.action), each.start, each.end) for each in row] for row in timeline.intervals]
    assert rows == [
        [("0F0", 0, 3), ("0F1", 3, 6), ("0B0", 13, 16), ("0B1", 19, 22)],
        [("0F0", 5, 8), ("0B0", 8, 11), ("0F1", 11, 14), ("0B1", 14, 17)],
    ]
    path = critical_path(timeline)
    assert [(str(piece.what), piece.end - piece.start) for piece in path] == [
        ("0F0", 3),
        ("activation of microbatch 0 for stage 1 (rank 0 to 1)", 2),
        *[("0F0", 3), ("0B0", 3), ("0F1", 3), ("0B1", 3)],
        ("gradient of microbatch 1 for stage 0 (rank 1 to 0)", 2),
        ("0B1", 3),
    ]
    assert [piece.rank for piece in path if isinstance(piece.what, Transfer)] == [0, 1]
    # Rank 0 has its gradients 2 late, twice; rank 1 its first activation.
    assert rank_waits(timeline) == [(6, 4), (8, 2)]
