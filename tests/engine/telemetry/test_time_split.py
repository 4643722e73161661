"""Where a step goes: without gaps, each thing in its part; a bubble that is the schedule's where only the schedule waits."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pipeline import schedules
from engine.pipeline.actions import Action, Kind, Schedule
from engine.pipeline.lowering import Post
from engine.pipeline.simulate import Costs, simulate
from engine.telemetry.marks import Doing
from engine.telemetry.time_split import PARTS, Tally, TimeSplit, span_of, work_out


@dataclass(frozen=True)
class Call:
    op: str
    axis: str
    purpose: str = ""


F0 = Action(Kind.F, 0, 0)
RECEIVE = Call("recv", "pp_forward")
STEP = Call("all_reduce", "world", "step")


@pytest.mark.parametrize(
    ("doing", "span"),
    [
        (Doing("data"), "data"),
        (Doing("checkpoint"), "checkpoint"),
        (Doing("checkpoint", wait=STEP), "checkpoint"),
        (Doing("other"), "other"),
        (Doing("validation", F0), None),
        (Doing("validation", F0, RECEIVE), None),
        (Doing("optimizer"), "optimizer"),
        (Doing("optimizer", wait=STEP), "end_wait"),
        (Doing("forward_backward"), "other"),
        (Doing("forward_backward", F0), "compute"),
        (Doing("forward_backward", Post("forward", ())), "exposed_pp"),
        (Doing("forward_backward", F0, RECEIVE), "input_wait"),
        (Doing("forward_backward", F0, Call("recv", "pp_backward")), "input_wait"),
        (Doing("forward_backward", None, Call("send", "pp_forward")), "exposed_pp"),
        (Doing("forward_backward", F0, Call("all_reduce", "tp", "cross-entropy max")), "exposed_tp"),
        (Doing("forward_backward", F0, Call("all_gather", "dp", "parameters")), "exposed_dp"),
        (Doing("forward_backward", None, Call("reduce_scatter", "dp", "gradients")), "exposed_dp"),
        (Doing("forward_backward", None, Call("all_reduce", "tp", "second sum")), "exposed_dp"),
        (Doing("forward_backward", None, Call("all_reduce", "kv_replicas", "second sum")), "exposed_dp"),
        (Doing("forward_backward", None, Call("all_reduce", "ends", "second sum")), "end_wait"),
    ],
    ids=str,
)
def test_what_a_rank_does_belongs_to_one_part(doing: Doing, span: str | None) -> None:
    assert span_of(doing) == span


def split_of(schedule: Schedule, steps: Sequence[Sequence[tuple[Doing, float]]]) -> TimeSplit:
    """The split of one step, from what each rank (dp and tp 1) does and for how long."""
    rows = []
    for doings in steps:
        tally, times = Tally(), [100.0]
        for _, seconds in doings:
            times.append(times[-1] + seconds)
        tally.add(2, [doing for doing, _ in doings], times)
        rows.append(tally.numbers(schedule.placement.vpp))
    return work_out(rows, list(range(schedule.placement.pp)), schedule, 2, 2)


durations = st.floats(0.5, 2.0)


@settings(deadline=None, max_examples=25)
@given(
    pp=st.integers(2, 4),
    vpp=st.integers(1, 2),
    num_microbatches=st.integers(1, 6),
    lists=st.data(),
    latency=st.floats(0, 0.25),
)
def test_where_only_the_schedule_waits_the_measured_bubble_is_the_simulated_one(
    pp: int, vpp: int, num_microbatches: int, lists: st.DataObject, latency: float
) -> None:
    """Every rank runs its actions when the simulator says, waits in between, and leaves the step's agreement with the last one."""
    schedule = schedules.build("1f1b" if vpp == 1 else "interleaved", pp, vpp, num_microbatches)
    stages = st.lists(durations, min_size=pp * vpp, max_size=pp * vpp)
    costs = Costs(lists.draw(stages), lists.draw(stages), (0.0,) * (pp * vpp))
    ideal = simulate(schedule, costs)
    ranks = []
    for row in ideal.intervals:
        doings, now = [(Doing("data"), 0.125)], 0.0
        for interval in row:
            if interval.start > now:
                doings.append((Doing("forward_backward", interval.action, RECEIVE), interval.start - now))
            doings.append((Doing("forward_backward", interval.action), interval.end - interval.start))
            now = interval.end
        doings.append((Doing("optimizer", wait=STEP), ideal.span - now + latency))
        doings.append((Doing("optimizer"), 0.25))
        ranks.append(doings)
    split = split_of(schedule, ranks)
    for rank, parts in enumerate(split.ranks):
        assert sum(parts.values()) == pytest.approx(0.375 + ideal.span + latency)
        assert parts["compute"] == pytest.approx(ideal.busy(rank))
        assert parts["bubble"] == pytest.approx(ideal.span - ideal.busy(rank), abs=1e-9)
        assert split.schedule_bubbles[rank] == pytest.approx(ideal.span - ideal.busy(rank), abs=1e-9)
        assert parts["other"] == pytest.approx(latency, abs=1e-9)
    assert sum(split.seconds.values()) == pytest.approx(split.step_seconds)
    assert sum(split.shares.values()) == pytest.approx(1.0)


def test_waits_inside_an_action_lengthen_it_for_the_schedule_but_are_not_compute() -> None:
    """Two ranks, one microbatch: 0F0 on rank 0 takes 1 s and waits 1 s for tp; what rank 1 then waits is the schedule's fault."""
    schedule = schedules.build("1f1b", 2, 1, 1)
    b0, tp = Action(Kind.B, 0, 0), Call("all_reduce", "tp", "mlp forward")
    phase = "forward_backward"
    first = [(Doing(phase, F0), 0.5), (Doing(phase, F0, tp), 1.0), (Doing(phase, F0), 0.5)]
    first += [(Doing(phase, b0, RECEIVE), 2.5), (Doing(phase, b0), 1.0)]
    second = [(Doing(phase, F0, RECEIVE), 2.25), (Doing(phase, F0), 1.0), (Doing(phase, b0), 1.0)]
    second += [(Doing("optimizer", wait=STEP), 1.25)]
    split = split_of(schedule, [first, second])
    assert [rank["compute"] for rank in split.ranks] == [2.0, 2.0]
    assert [rank["exposed_tp"] for rank in split.ranks] == [1.0, 0.0]
    # The schedule: 2 s and 1 s of F, 1 s and 1 s of B. The transfers of 0.25 s each come on top.
    assert split.schedule_bubbles == (2.0, 3.0)
    assert [rank["bubble"] for rank in split.ranks] == [2.5, 3.5]


def test_without_a_pipeline_nothing_is_bubble() -> None:
    schedule = schedules.build("1f1b", 1, 1, 2)
    rows = [
        [(Doing("forward_backward", F0), 1.0), (Doing("optimizer", wait=STEP), 0.5)],
        [(Doing("forward_backward", F0), 1.4), (Doing("optimizer", wait=STEP), 0.1)],
    ]
    tallies = [Tally(), Tally()]
    for tally, row in zip(tallies, rows, strict=True):
        tally.add(2, [doing for doing, _ in row], [0.0, row[0][1], 1.5])
    split = work_out([tally.numbers(1) for tally in tallies], [0, 0], schedule, 2, 2)
    assert [rank["bubble"] for rank in split.ranks] == [0.0, 0.0] == list(split.schedule_bubbles)
    assert [rank["other"] for rank in split.ranks] == pytest.approx([0.5, 0.1])
    record = split.to_record()
    assert (record["slowest_rank"], record["slowest_compute_seconds"]) == (1, 1.4)
    assert record["step_seconds"] == pytest.approx(sum(record[f"{part}_seconds"] for part in PARTS)) == 1.5


def test_means_are_per_step_and_validation_is_in_none() -> None:
    schedule = schedules.build("1f1b", 1, 1, 2)
    tally = Tally()
    for step, seconds in ((2, 1.0), (3, 3.0)):
        doings = [Doing("validation", F0), Doing("data"), Doing("forward_backward", F0)]
        tally.add(step, doings, [0.0, 50.0, 50.0 + seconds, 50.0 + 2 * seconds])
    split = work_out([tally.numbers(1)], [0], schedule, 2, 3)
    assert split.ranks[0]["data"] == split.ranks[0]["compute"] == 2.0
    assert split.step_seconds == 4.0


def test_a_step_that_was_held_up_does_not_make_a_rank_look_slow() -> None:
    tally = Tally()
    for step, seconds in ((2, 1.0), (3, 9.0), (4, 1.5)):
        tally.add(step, [Doing("forward_backward", F0)], [0.0, seconds])
    split = work_out([tally.numbers(1)], [0], schedules.build("1f1b", 1, 1, 2), 2, 4)
    assert split.usual_compute == (1.5,)
    assert split.ranks[0]["compute"] == pytest.approx(11.5 / 3)


def test_a_line_says_what_matters_and_fits_into_100_columns() -> None:
    even = dict.fromkeys(PARTS, 1.0)
    split = TimeSplit(2, 9, (even, even), (0.5, 0.7), (1.0, 1.0))
    assert str(split) == (
        "compute 11%  tp 11%  bubble 11% (schedule 7%)  pp 11%  dp 11%  optimizer 11%  data 11%  checkpoint 11%  other 11%"
    )
    quiet = {**dict.fromkeys(PARTS, 0.0), "compute": 9.99, "data": 0.01}
    assert str(TimeSplit(2, 9, (quiet,), (0.0,), (9.99,))) == "compute 100%"
    usual = {**even, "compute": 20.0, "data": 0.0, "checkpoint": 0.0}
    assert len(str(TimeSplit(2, 9, (usual,), (0.5,), (20.0,)))) <= 90
