"""Where a step goes: each thing in its part, means per step, a line that says it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triaxis.engine.layout.rank_grid import Coordinates
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Action, Kind
from triaxis.engine.pipeline.lowering import Post
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.telemetry.timing.bubble import Attribution
from triaxis.engine.telemetry.timing.marks import Activity
from triaxis.engine.telemetry.timing.time_split import (
    PARTS,
    SPANS,
    USUAL,
    Interval,
    StepTally,
    TimeSplit,
    seconds_without,
    span_of,
)


@dataclass(frozen=True)
class Call:
    op: str
    axis: str
    purpose: str = ""


F0 = Action(Kind.F, 0, 0)
RECEIVE = Call("recv", "pp_forward")
STEP = Call("all_reduce", "world", "step")


@pytest.mark.parametrize(
    ("activity", "span"),
    [
        (Activity(StepPart.DATA), "data"),
        (Activity(StepPart.CHECKPOINT), "checkpoint"),
        (Activity(StepPart.CHECKPOINT, wait=STEP), "checkpoint"),
        (Activity(StepPart.OTHER), "other"),
        (Activity(StepPart.VALIDATION, F0), None),
        (Activity(StepPart.VALIDATION, F0, RECEIVE), None),
        (Activity(StepPart.OPTIMIZER), "optimizer"),
        (Activity(StepPart.OPTIMIZER, wait=STEP), "end_wait"),
        (Activity(StepPart.FORWARD_BACKWARD), "other"),
        (Activity(StepPart.FORWARD_BACKWARD, None, Call("all_reduce", "world", "labels")), "other"),
        (Activity(StepPart.FORWARD_BACKWARD, F0), "compute"),
        (Activity(StepPart.FORWARD_BACKWARD, Post("forward", ())), "exposed_pp"),
        (Activity(StepPart.FORWARD_BACKWARD, F0, RECEIVE), "input_wait"),
        (Activity(StepPart.FORWARD_BACKWARD, F0, Call("recv", "pp_backward")), "input_wait"),
        (Activity(StepPart.FORWARD_BACKWARD, None, Call("send", "pp_forward")), "exposed_pp"),
        (Activity(StepPart.FORWARD_BACKWARD, F0, Call("all_reduce", "tp", "cross-entropy max")), "exposed_tp"),
        (Activity(StepPart.FORWARD_BACKWARD, F0, Call("all_gather", "cp", "keys and values forward")), "exposed_cp"),
        (Activity(StepPart.FORWARD_BACKWARD, F0, Call("all_to_all", "experts", "experts counts")), "exposed_ep"),
        (Activity(StepPart.FORWARD_BACKWARD, F0, Call("all_reduce", "sample", "fractions")), "exposed_ep"),
        (Activity(StepPart.FORWARD_BACKWARD, F0, Call("host_read", "", "experts counts")), "host_read"),
        (Activity(StepPart.VALIDATION, F0, Call("host_read", "", "experts counts")), None),
        (Activity(StepPart.FORWARD_BACKWARD, F0, Call("all_gather", "dp", "parameters")), "exposed_dp"),
        (Activity(StepPart.FORWARD_BACKWARD, None, Call("reduce_scatter", "dp", "gradients")), "exposed_dp"),
        (Activity(StepPart.FORWARD_BACKWARD, None, Call("all_reduce", "tp", "replica gradients")), "exposed_dp"),
        (
            Activity(StepPart.FORWARD_BACKWARD, None, Call("all_reduce", "kv_replicas", "replica gradients")),
            "exposed_dp",
        ),
        (Activity(StepPart.FORWARD_BACKWARD, None, Call("all_reduce", "ends", "replica gradients")), "ends_wait"),
    ],
    ids=str,
)
def test_what_a_rank_does_belongs_to_one_part(activity: Activity, span: str | None) -> None:
    assert span_of(activity) == span


def alone(num_ranks: int) -> Attribution:
    """Of ranks without a pipeline."""
    return Attribution(schedules.build("1f1b", 1, 1, 2), [Coordinates(0, rank, 0, 0) for rank in range(num_ranks)])


def split_of(tallies: Sequence[StepTally]) -> TimeSplit:
    rows = np.array([tally.numbers(0) for tally in tallies])
    return alone(len(tallies)).work_out(rows, tallies[0].steps[0], tallies[0].steps[-1])


def test_without_a_pipeline_nothing_is_bubble() -> None:
    rows = [
        [(Activity(StepPart.FORWARD_BACKWARD, F0), 1.0), (Activity(StepPart.OPTIMIZER, wait=STEP), 0.5)],
        [(Activity(StepPart.FORWARD_BACKWARD, F0), 1.4), (Activity(StepPart.OPTIMIZER, wait=STEP), 0.1)],
    ]
    tallies = [StepTally(), StepTally()]
    for tally, row in zip(tallies, rows, strict=True):
        tally.add(2, [activity for activity, _ in row], [0.0, row[0][1], 1.5])
    split = split_of(tallies)
    assert [rank["bubble"] for rank in split.ranks] == [0.0, 0.0] == list(split.schedule_bubbles)
    assert [rank["other"] for rank in split.ranks] == pytest.approx([0.5, 0.1])
    record = split.to_record()
    assert (record["slowest_rank"], record["slowest_compute_seconds"]) == (1, 1.4)
    assert record["step_seconds"] == pytest.approx(sum(record[f"{part}_seconds"] for part in PARTS)) == 1.5


def test_means_are_per_step_and_validation_is_in_none() -> None:
    tally = StepTally()
    for step, seconds in ((2, 1.0), (3, 3.0)):
        activities = [
            Activity(StepPart.VALIDATION, F0),
            Activity(StepPart.DATA),
            Activity(StepPart.FORWARD_BACKWARD, F0),
        ]
        tally.add(step, activities, [0.0, 50.0, 50.0 + seconds, 50.0 + 2 * seconds])
    split = split_of([tally])
    assert (split.first_step, split.last_step) == (2, 3)
    assert split.ranks[0]["data"] == split.ranks[0]["compute"] == 2.0
    assert split.step_seconds == 4.0


def test_a_step_that_was_held_up_does_not_make_a_rank_look_slow() -> None:
    tally = StepTally()
    for step, seconds in ((2, 1.0), (3, 9.0), (4, 1.5)):
        tally.add(step, [Activity(StepPart.FORWARD_BACKWARD, F0)], [0.0, seconds])
    split = split_of([tally])
    assert split.usual_compute == (1.5,)
    assert split.ranks[0]["compute"] == pytest.approx(11.5 / 3)


_moments = st.integers(0, 30)
_intervals = st.lists(st.tuples(_moments, _moments).map(lambda ends: (float(min(ends)), float(max(ends)))), max_size=6)


@given(inside=_intervals, outside=_intervals)
def test_time_in_some_interval_and_in_none_of_others(inside: list[Interval], outside: list[Interval]) -> None:
    """Counted moment by moment, of intervals that overlap, touch, repeat or are empty."""

    def is_in(moment: int, intervals: list[Interval]) -> bool:
        return any(start <= moment < stop for start, stop in intervals)

    expected = sum(is_in(moment, inside) and not is_in(moment, outside) for moment in range(30))
    assert seconds_without(inside, outside) == expected


def test_calls_of_context_parallelism_are_hidden_where_the_rank_does_not_wait_for_one() -> None:
    """From 1 to 5 and from 3 to 9 of 10 seconds a call is under way; from 4 to 5 and from 8 to 9 the rank waits."""
    gather = Call("all_gather", "cp", "keys and values forward")
    activities = [
        Activity(StepPart.FORWARD_BACKWARD, F0, wait)
        for wait in (None, gather, None, Call("all_reduce", "tp"), gather, None)
    ]
    tallies = [StepTally(), StepTally()]
    tallies[0].add(2, activities, [0.0, 4.0, 5.0, 6.0, 8.0, 9.0, 10.0], [(1.0, 5.0), (3.0, 9.0), (9.5, 9.25)])
    tallies[1].add(2, [Activity(StepPart.FORWARD_BACKWARD, F0)], [0.0, 10.0])
    places = [Coordinates(0, 0, rank, 0) for rank in range(2)]
    rows = np.array([tally.numbers(0) for tally in tallies])
    split = Attribution(schedules.build("1f1b", 1, 1, 2), places).work_out(rows, 2, 2)
    assert split.hidden_cp == (6.0, 0.0)
    assert [rank["exposed_cp"] for rank in split.ranks] == [2.0, 0.0]
    assert split.to_record()["hidden_cp_seconds"] == 3.0
    assert "cp 10% (4000 ms, 3000 hidden)" in str(split)
    assert split_of(tallies[:1]).hidden_cp is None, "ranks without context parallelism"
    assert "hidden_cp_seconds" not in split_of(tallies[:1]).to_record()


def test_a_call_that_is_hidden_is_on_the_line_with_its_time() -> None:
    parts = {**dict.fromkeys(PARTS, 0.0), "compute": 0.299, "exposed_cp": 0.001}
    assert str(TimeSplit(2, 2, (parts,), (0.0,), (0.299,), (0.0025,))) == "compute 100%  cp 0% (3.5 ms, 2.5 hidden)"
    parts["exposed_cp"] = 0.012
    assert "cp 4% (21 ms, 9 hidden)" in str(TimeSplit(2, 2, (parts,), (0.0,), (0.299,), (0.009,)))


def test_a_line_says_what_matters_and_fits_into_100_columns() -> None:
    even = dict.fromkeys(PARTS, 1.0)
    split = TimeSplit(2, 9, (even, even), (0.5, 0.7), (1.0, 1.0))
    assert str(split) == (
        "compute 8%  tp 8%  cp 8%  ep 8%  host read 8%  bubble 8% (schedule 5%)  pp 8%  dp 8%  optimizer 8%  data 8%  "
        "checkpoint 8%  other 8%"
    )
    quiet = {**dict.fromkeys(PARTS, 0.0), "compute": 9.99, "data": 0.01}
    assert str(TimeSplit(2, 9, (quiet,), (0.0,), (9.99,))) == "compute 100%"
    usual = {**even, "compute": 20.0, "exposed_ep": 0.0, "host_read": 0.0, "data": 0.0, "checkpoint": 0.0}
    assert len(str(TimeSplit(2, 9, (usual,), (0.5,), (20.0,)))) <= 90


def test_a_step_that_is_made_again_to_find_what_is_not_finite_is_no_part_of_the_pipelines_row() -> None:
    """It is made between two steps, through the same executor: its actions are more than a step's schedule has."""
    tally = StepTally()
    activities = [
        Activity(StepPart.OTHER, F0),
        Activity(StepPart.OTHER, F0, RECEIVE),
        Activity(StepPart.FORWARD_BACKWARD, F0),
        Activity(StepPart.OPTIMIZER, wait=STEP),
    ]
    tally.add(3, activities, [0.0, 4.0, 5.0, 7.0, 8.0])
    numbers = tally.numbers(1)
    begin, through, *waits, waited, took = numbers[USUAL + 1 :]
    assert (begin, through, waits, waited, took) == (-3.0, -1.0, [1.0, 0.0, 0.0, 0.0], 0.0, 2.0)
    assert numbers[list(SPANS).index("other")] == 5.0
