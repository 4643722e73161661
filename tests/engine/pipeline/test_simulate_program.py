"""Timing of lowered programs: by hand, against the plain event timing, by what must hold for any costs."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.pipeline.published_bubbles import Published, published_bubbles
from triaxis.engine.errors import ScheduleError
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Action, Schedule
from triaxis.engine.pipeline.lowering import Post, Program, Transfer, lower
from triaxis.engine.pipeline.simulate import Costs, simulate
from triaxis.engine.pipeline.simulate_program import Messages, ProgramTimeline, simulate_program
from triaxis.engine.pipeline.validate import check

GLOO = Messages(backend="gloo")
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
        for messages in (Messages(), GLOO):
            assert simulate_program(program, costs, messages).intervals == simulate(schedule, costs).intervals
    # With other costs than those that `lower` placed the posts by, a call may come late and never early.
    costs = data.draw(some_costs(schedule, st.just(0.0)))
    plain = simulate(schedule, costs)
    for messages in (Messages(), GLOO):
        rows = simulate_program(program, costs, messages).intervals
        for row, plain_row in zip(rows, plain.intervals, strict=True):
            assert all(mine.start >= its.start for mine, its in zip(row, plain_row, strict=True))


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_for_any_costs(data: st.DataObject) -> None:
    """No action starts before its inputs, a channel has one transfer at a time, the critical path is as long as the span."""
    schedule = data.draw(some_schedules())
    program = lower(schedule, data.draw(st.sampled_from(["early", "late"])))
    costs = [data.draw(some_costs(schedule, st.floats(1, 4))) for _ in range(schedule.num_microbatches)]
    messages = Messages(
        data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        data.draw(st.sampled_from([0.0, 0.25])),
        data.draw(st.sampled_from(["nccl", "gloo"])),
    )
    timeline = simulate_program(program, costs, messages)
    assert_inputs_are_there(timeline)
    assert_channels_are_used_in_turn(timeline, costs, messages.latency)
    assert_calls_end_as_a_whole(timeline, messages)
    assert_path(timeline)
    facts = check(program)
    assert timeline.peak_in_flight == facts.peak_in_flight and timeline.peak_held == facts.peak_held
    for rank, row in enumerate(timeline.intervals):
        for interval in row:
            stage = schedule.placement.stage_of(rank, interval.action.chunk)
            length = costs[interval.action.microbatch].of(interval.action.kind, stage)
            assert interval.end - interval.start == pytest.approx(length, abs=1e-9)
        assert timeline.busy(rank) + sum(timeline.waits[rank]) == pytest.approx(timeline.span)


def assert_inputs_are_there(timeline: ProgramTimeline) -> None:
    schedule = timeline.schedule
    for rank, row in enumerate(timeline.intervals):
        assert all(before.end <= after.start for before, after in pairwise(row))
        made = {}
        for interval in row:
            stage = schedule.placement.stage_of(rank, interval.action.chunk)
            fed, source = timeline.fed_by(rank, interval.action), schedule.input_of(stage, interval.action)
            if fed is not None:
                assert fed.produced <= fed.start <= fed.end <= fed.ready <= interval.start
            elif source is not None:
                assert made[source] <= interval.start
            made[schedule.output_of(stage, interval.action)] = interval.end


def assert_channels_are_used_in_turn(timeline: ProgramTimeline, costs: list[Costs], latency: float) -> None:
    users: dict[tuple[int, int], float] = {}
    for each in timeline.transfers:
        ends = each.transfer.source, each.transfer.destination
        whole = costs[each.transfer.microbatch].transfer
        assert each.end == pytest.approx(each.start + whole)
        assert each.start >= users.get(ends, 0.0) - 1e-9
        users[ends] = each.start + whole - latency


def assert_calls_end_as_a_whole(timeline: ProgramTimeline, messages: Messages) -> None:
    end_of = {each.transfer: each.end for each in timeline.transfers}
    ready_of = {each.transfer: each.ready for each in timeline.transfers}
    for rank, row in enumerate(timeline.program.instructions):
        last = {"forward": 0.0, "backward": 0.0}
        for post in (each for each in row if isinstance(each, Post)):
            for transfer in post.transfers:
                if transfer.destination == rank:
                    whole = max(map(end_of.__getitem__, post.transfers))
                    assert ready_of[transfer] == (whole if messages.backend == "nccl" else end_of[transfer])
            if messages.backend == "nccl":
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
    assert timeline.waits == ((6, 4, 0), (8, 2, 0))
    assert timeline.in_flight(1) == [(5, 1), (11, 0), (11, 1), (17, 0)]


def test_late_receives_expose_the_transfer() -> None:
    costs = Costs.uniform(3, transfer=0.5)
    schedule = schedules.one_f_one_b(3, 6)
    assert simulate_program(lower(schedule), costs).span < simulate_program(lower(schedule, "late"), costs).span


def test_transfers_of_one_way_take_turns_and_a_latency_overlaps() -> None:
    program, costs = lower(schedules.gpipe(2, 6)), Costs.uniform(2, forward=1, transfer=4)
    spans = [simulate_program(program, costs, Messages(latency, backend="gloo")).span for latency in (0, 2, 4)]
    assert spans[0] > spans[1] > spans[2]


def test_under_nccl_a_message_may_wait_for_a_call_before_its_own() -> None:
    """A first stage that is slow: the rank behind it posts an early receive, and its send queues behind it."""
    costs = Costs((4, 1, 1, 1), (1, 1, 1, 2), (2, 4, 3, 2))
    program = lower(schedules.one_f_one_b(4, 6))
    assert simulate_program(program, costs, GLOO).span == 53
    assert simulate_program(program, costs).span == 59


def test_posts_take_the_time_of_their_rank() -> None:
    program = lower(schedules.one_f_one_b(2, 4))
    timeline = simulate_program(program, Costs.uniform(2), Messages(post=0.125))
    num_posts = sum(isinstance(each, Post) for each in program.instructions[1])
    assert timeline.waits[1].posts == num_posts * 0.125
    assert timeline.span > simulate_program(program, Costs.uniform(2)).span


def test_a_slow_microbatch_delays_what_follows_it() -> None:
    program = lower(schedules.one_f_one_b(2, 3))
    usual, slow = Costs.uniform(2), Costs.uniform(2, forward=5)
    timeline = simulate_program(program, [usual, slow, usual])
    lengths = {str(each.action): each.end - each.start for each in timeline.intervals[0]}
    assert lengths == {"0F0": 1, "0F1": 5, "0F2": 1, "0B0": 2, "0B1": 2, "0B2": 2}


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
    with pytest.raises(ScheduleError, match=r"does not end: rank 0 at its instruction 1 \(0B0\), rank 1 at"):
        simulate_program(without, Costs.uniform(2))


@pytest.mark.parametrize(
    ("costs", "messages", "words"),
    [
        (Costs.uniform(3), Messages(), "3 entries and the schedule 2 stages"),
        ([Costs.uniform(2)], Messages(), "costs of 1 microbatch for a schedule of 4"),
        (Costs.uniform(2, forward=-1), Messages(), "a cost of -1"),
        (Costs.uniform(2, transfer=float("nan")), Messages(), "a cost of nan"),
        (Costs.uniform(2, transfer=1), Messages(latency=2), "a latency of 2 of transfers that take 1"),
        (Costs.uniform(2), Messages(post=float("inf")), "a cost of inf"),
    ],
)
def test_costs_that_cannot_be_timed_are_refused(costs: Costs, messages: Messages, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        simulate_program(lower(schedules.one_f_one_b(2, 4)), costs, messages)
