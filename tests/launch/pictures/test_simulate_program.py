"""Timing of lowered programs: by hand, against the plain event timing, by what must hold for any costs."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.pipeline.published_bubbles import Published, published_bubbles
from triaxis.engine.errors import ScheduleError
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Action, Schedule
from triaxis.engine.pipeline.lowering import Post, Program, Transfer, feeding_transfer, lower
from triaxis.engine.pipeline.simulate import Costs, simulate
from triaxis.launch.pictures.simulate_program import ProgramTimeline, simulate_program

TIMES = st.floats(0, 8, allow_subnormal=False).map(lambda time: round(time, 2))


@st.composite
def some_schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb_h1", "forward_only"]))
    vpp = draw(st.integers(2, 3)) if name == "interleaved" else 1
    return schedules.build(name, draw(st.integers(1, 5)), vpp, draw(st.integers(1, 9)))


@st.composite
def some_costs(draw: st.DrawFn, schedule: Schedule, transfer: st.SearchStrategy[float]) -> Costs:
    num_stages = schedule.placement.num_stages
    times = st.lists(TIMES, min_size=num_stages, max_size=num_stages)
    return Costs(draw(times), draw(times), draw(times), draw(transfer))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_with_messages_that_take_no_time_it_is_the_plain_timing(data: st.DataObject) -> None:
    schedule = data.draw(some_schedules())
    program = lower(schedule, data.draw(st.sampled_from(["early", "late"])))
    unit, scale = Costs.uniform(schedule.placement.num_stages), data.draw(st.sampled_from([1, 0.25, 1024]))
    scaled = Costs.uniform(schedule.placement.num_stages, scale, scale, scale)
    for costs in (unit, scaled):
        assert simulate_program(program, costs).intervals == simulate(schedule, costs).intervals
    # With other costs than those that `lower` placed the posts by, a call may come late and never early.
    costs = data.draw(some_costs(schedule, st.just(0.0)))
    plain = simulate(schedule, costs)
    for row, plain_row in zip(simulate_program(program, costs).intervals, plain.intervals, strict=True):
        assert all(mine.start >= its.start for mine, its in zip(row, plain_row, strict=True))


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_for_any_costs(data: st.DataObject) -> None:
    """No action starts before its inputs, a channel has one transfer at a time, the critical path is as long as the span."""
    schedule = data.draw(some_schedules())
    program = lower(schedule, data.draw(st.sampled_from(["early", "late"])))
    costs = data.draw(some_costs(schedule, st.floats(1, 4)))
    timeline = simulate_program(program, costs)
    assert_inputs_are_there(timeline)
    assert_channels_are_used_in_turn(timeline, costs)
    assert_calls_end_as_a_whole(timeline, program)
    assert_path(timeline)
    for rank, row in enumerate(timeline.intervals):
        for interval in row:
            stage = schedule.placement.stage_of(rank, interval.action.chunk)
            length = costs.of(interval.action.kind, stage)
            assert interval.end - interval.start == pytest.approx(length, abs=1e-9)
        assert timeline.busy(rank) + sum(timeline.waits[rank]) == pytest.approx(timeline.span)


def assert_inputs_are_there(timeline: ProgramTimeline) -> None:
    schedule, moved = timeline.schedule, {each.transfer: each for each in timeline.transfers}
    for rank, row in enumerate(timeline.intervals):
        assert all(before.end <= after.start for before, after in pairwise(row))
        made = {}
        for interval in row:
            stage = schedule.placement.stage_of(rank, interval.action.chunk)
            feeding, source = (
                feeding_transfer(schedule, rank, interval.action),
                schedule.input_of(stage, interval.action),
            )
            if feeding is not None:
                fed = moved[feeding]
                assert fed.produced <= fed.start <= fed.end <= fed.ready <= interval.start
            elif source is not None:
                assert made[source] <= interval.start
            made[schedule.output_of(stage, interval.action)] = interval.end


def assert_channels_are_used_in_turn(timeline: ProgramTimeline, costs: Costs) -> None:
    users: dict[tuple[int, int], float] = {}
    for each in timeline.transfers:
        ends = each.transfer.source, each.transfer.destination
        assert each.end == pytest.approx(each.start + costs.transfer)
        assert each.start >= users.get(ends, 0.0) - 1e-9
        users[ends] = each.end


def assert_calls_end_as_a_whole(timeline: ProgramTimeline, program: Program) -> None:
    end_of = {each.transfer: each.end for each in timeline.transfers}
    ready_of = {each.transfer: each.ready for each in timeline.transfers}
    for rank, row in enumerate(program.instructions):
        last = {"forward": 0.0, "backward": 0.0}
        for post in (each for each in row if isinstance(each, Post)):
            for transfer in post.transfers:
                if transfer.destination == rank:
                    assert ready_of[transfer] == max(map(end_of.__getitem__, post.transfers))
            starts = [each.start for each in timeline.transfers if each.transfer in post.transfers]
            assert min(starts) >= last[post.direction]
            last[post.direction] = max(map(end_of.__getitem__, post.transfers))


def assert_path(timeline: ProgramTimeline) -> None:
    path = timeline.critical_path
    if timeline.span == 0:
        assert not path
        return
    assert path[0].start == 0 and path[-1].end == timeline.span
    assert all(before.end == after.start and before.start < before.end for before, after in pairwise(path))
    real = {(rank, each.action): each for rank, row in enumerate(timeline.intervals) for each in row}
    moved = {each.transfer: each for each in timeline.transfers}
    for piece in path:
        if isinstance(piece.what, Action):
            assert (piece.start, piece.end) == (
                real[piece.rank, piece.what].start,
                real[piece.rank, piece.what].end,
            )
        elif isinstance(piece.what, Transfer):
            assert moved[piece.what].start == piece.start and piece.end <= moved[piece.what].end


def test_by_hand() -> None:
    """A transfer of 2 that is received early is hidden behind an action; one that nothing hides is waited for."""
    timeline = simulate_program(lower(schedules.one_f_one_b(2, 2)), Costs.uniform(2, 3, 2, 1, 2))
    rows = [[(str(each.action), each.start, each.end) for each in row] for row in timeline.intervals]
    assert rows == [
        [("0F0", 0, 3), ("0F1", 3, 6), ("0B0", 13, 16), ("0B1", 19, 22)],
        [("0F0", 5, 8), ("0B0", 8, 11), ("0F1", 11, 14), ("0B1", 14, 17)],
    ]
    times = [(str(each.transfer), each.produced, each.start, each.ready) for each in timeline.transfers]
    assert times == [
        ("activation of microbatch 0 for stage 1 (rank 0 to 1)", 3, 3, 5),
        ("activation of microbatch 1 for stage 1 (rank 0 to 1)", 6, 8, 10),
        ("gradient of microbatch 0 for stage 0 (rank 1 to 0)", 11, 11, 13),
        ("gradient of microbatch 1 for stage 0 (rank 1 to 0)", 17, 17, 19),
    ]
    words = [(str(piece.what), piece.end - piece.start) for piece in timeline.critical_path]
    assert words == [
        ("0F0", 3),
        ("activation of microbatch 0 for stage 1 (rank 0 to 1)", 2),
        *[("0F0", 3), ("0B0", 3), ("0F1", 3), ("0B1", 3)],
        ("gradient of microbatch 1 for stage 0 (rank 1 to 0)", 2),
        ("0B1", 3),
    ]
    # Rank 0 has its gradients 2 late, twice; rank 1 its first activation.
    assert timeline.waits == ((6, 4), (8, 2))


def test_late_receives_expose_the_transfer() -> None:
    costs = Costs.uniform(3, transfer=0.5)
    schedule = schedules.one_f_one_b(3, 6)
    assert simulate_program(lower(schedule), costs).span < simulate_program(lower(schedule, "late"), costs).span


def test_under_nccl_a_message_may_wait_for_a_call_before_its_own() -> None:
    """A first stage that is slow: the rank after it posts an early receive, and its send queues behind it; 53 if not."""
    costs = Costs((4, 1, 1, 1), (1, 1, 1, 2), (2, 4, 3, 2))
    program = lower(schedules.one_f_one_b(4, 6))
    assert simulate_program(program, costs).span == 59


@pytest.mark.parametrize("row", [row for row in published_bubbles() if row.values[0].p == 8])
def test_the_bubbles_of_a_paper_from_the_programs_that_run(row: Published) -> None:
    for name in ("1f1b", "zb_h1"):
        timeline = simulate_program(lower(schedules.build(name, row.p, 1, row.m)), row.costs())
        assert round(timeline.largest_bubble_fraction, 4) == pytest.approx(row.bubbles[name], abs=1e-9), name
    if row.m == 24:
        timeline = simulate_program(lower(schedules.interleaved(row.p, row.chunks, row.m)), row.costs(row.chunks))
        assert timeline.largest_bubble_fraction == pytest.approx(row.bubbles["interleaved"], abs=0.004)


def test_a_program_that_does_not_end_is_refused() -> None:
    program = lower(schedules.one_f_one_b(2, 1))
    first, second = program.instructions
    without = Program(program.schedule, (tuple(each for each in first if not isinstance(each, Post)), second))
    with pytest.raises(ScheduleError, match=r"deadlocks, .* forever: rank 0 at its instruction 1 \(0B0\), rank 1 at"):
        simulate_program(without, Costs.uniform(2))


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (Costs.uniform(3), "3 entries and the schedule 2 stages"),
        (Costs.uniform(2, forward=-1), "a cost of -1"),
        (Costs.uniform(2, transfer=float("nan")), "a cost of nan"),
        (Costs.uniform(2, transfer=float("inf")), "a cost of inf"),
    ],
)
def test_costs_that_cannot_be_timed_are_refused(costs: Costs, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        simulate_program(lower(schedules.one_f_one_b(2, 4)), costs)
