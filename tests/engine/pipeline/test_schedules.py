"""The schedules as lists: golden texts, counts, bounds of what is in flight, names."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.errors import ScheduleError
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Action, Kind, Output, Placement, Schedule
from triaxis.engine.pipeline.forwards import forward_only
from triaxis.engine.pipeline.lowering import lower
from triaxis.engine.pipeline.simulate import Costs, simulate
from triaxis.engine.pipeline.text import from_text, program_to_text, to_text
from triaxis.engine.pipeline.validate import check

GOLDEN = Path(__file__).parents[2] / "golden" / "schedules"
GOLDEN_SCHEDULES = {
    "gpipe_pp4_m4": schedules.gpipe(4, 4),
    "1f1b_pp4_m8": schedules.one_f_one_b(4, 8),
    "zb_h1_pp4_m8": schedules.build("zb_h1", 4, 1, 8),
    "interleaved_pp2_vpp2_m4": schedules.interleaved(2, 2, 4),
    "interleaved_pp4_vpp2_m8": schedules.interleaved(4, 2, 8),
    "interleaved_pp4_vpp2_m5": schedules.interleaved(4, 2, 5),
    "forward_only_pp2_vpp2_m4": schedules.build("forward_only", 2, 2, 4),
    "zbv_pp4_m9": schedules.build("zbv", 4, 2, 9),
    "forward_only_in_a_v_pp2_m4": forward_only(Placement(2, 2, is_v=True), 4),
}

sizes = st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(1, 17))


@pytest.mark.parametrize("name", GOLDEN_SCHEDULES)
def test_golden(name: str) -> None:
    """The file holds the schedule and, below it, what it is lowered to; a difference is for a person to judge."""
    schedule = GOLDEN_SCHEDULES[name]
    text = to_text(schedule) + "\n# lowered\n" + program_to_text(lower(schedule))
    assert text == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_1f1b_is_the_figure_of_the_papers() -> None:
    rows = to_text(schedules.one_f_one_b(3, 4)).splitlines()[1:]
    assert rows == [
        "rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "rank 1: 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3",
        "rank 2: 0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3",
    ]


@settings(max_examples=80, deadline=None)
@given(sizes)
def test_every_schedule_builds_lowers_and_checks(size: tuple[int, int, int]) -> None:
    """The checker runs the lowered program under NCCL's rules; the bounds are those of formulas and docstrings."""
    pp, vpp, num_microbatches = size
    names = ["interleaved", "forward_only"] + (["gpipe", "1f1b", "zb_h1"] if vpp == 1 else [])
    for name in names:
        schedule = schedules.build(name, pp, vpp, num_microbatches)
        report = check(lower(schedule))
        assert check(schedule).peak_in_flight == report.peak_in_flight
        assert report.peak_held == tuple(min(rank + 1, num_microbatches) * (name == "zb_h1") for rank in range(pp))
        assert max(report.peak_early_receives) <= 1
        for rank, peak in enumerate(report.peak_in_flight):
            assert _allowed(name, peak, rank, *size), (name, size, rank, peak)


def _allowed(name: str, peak: int, rank: int, pp: int, vpp: int, num_microbatches: int) -> bool:
    if name == "interleaved":
        bound = min(num_microbatches * vpp, 2 * (pp - rank - 1) + (vpp - 1) * pp + 1)
        return peak == bound if num_microbatches % pp == 0 else peak <= bound
    of_1f1b = min(pp - rank, num_microbatches)
    exact = {"gpipe": num_microbatches, "1f1b": of_1f1b, "zb_h1": of_1f1b, "forward_only": 0}
    return peak == exact[name]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(1, 30))
def test_zb_h1_keeps_no_more_microbatches_than_the_first_rank_of_1f1b(pp: int, num_microbatches: int) -> None:
    """In flight or held."""
    for row in schedules.build("zb_h1", pp, 1, num_microbatches).actions:
        now = peak = 0
        for action in row:
            now += (action.kind is Kind.F) - (action.kind is Kind.W)
            peak = max(peak, now)
        assert now == 0 and peak == min(pp, num_microbatches)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40))
def test_zbv_keeps_two_half_stages_per_rank_and_waits_for_half_a_pipeline(pp: int, num_microbatches: int) -> None:
    """Its docstring's bounds, over the program that runs: in flight and held, idle where F, I and W take equally long."""
    schedule = schedules.build("zbv", pp, 2, num_microbatches)
    check(lower(schedule))
    check(lower(schedule, "late"))
    timeline = simulate(schedule, Costs.uniform(2 * pp))
    for rank, row in enumerate(schedule.actions):
        live = peak = 0
        for action in row:
            live += (action.kind is Kind.F) - (action.kind is Kind.W)
            peak = max(peak, live)
        assert live == 0 and peak <= 2 * min(pp, num_microbatches)
        idle = timeline.span - timeline.busy(rank)
        assert idle == pp - 1 if num_microbatches >= 2 * pp - 1 else idle <= 4 * (pp - 1)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40))
def test_forwards_in_a_v_wait_only_at_their_ends(pp: int, num_microbatches: int) -> None:
    schedule = forward_only(Placement(pp, 2, is_v=True), num_microbatches)
    check(lower(schedule))
    check(lower(schedule, "late"))
    timeline = simulate(schedule, Costs.uniform(2 * pp))
    assert timeline.span == 2 * num_microbatches + 2 * (pp - 1)


@given(st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_placements_give_each_stage_one_place(pp: int, vpp: int, is_v: bool) -> None:
    placement = Placement(pp, 2 if is_v else vpp, is_v)
    places = [(placement.rank_of(stage), placement.chunk_of(stage)) for stage in range(placement.num_stages)]
    assert sorted(places) == [(rank, chunk) for rank in range(pp) for chunk in range(placement.vpp)]
    assert [placement.stage_of(rank, chunk) for rank, chunk in places] == list(range(placement.num_stages))
    assert placement.stages_on(0) == ((0, 2 * pp - 1) if is_v else tuple(range(0, placement.num_stages, pp)))


@settings(max_examples=50, deadline=None)
@given(sizes)
def test_text_round_trips(size: tuple[int, int, int]) -> None:
    schedule = schedules.interleaved(*size)
    assert from_text(to_text(schedule)) == schedule
    pp, _, num_microbatches = size
    evaluation = schedules.build("forward_only", *size)
    assert from_text("# a comment\n\n" + to_text(evaluation)) == evaluation
    in_a_v = schedules.build("zbv", pp, 2, num_microbatches)
    assert from_text(to_text(in_a_v)) == in_a_v


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "first line"),
        ("rank 0: 0F0\n", "first line"),
        ("schedule=x pp=1 vpp=1 microbatches=1 forward_only=yes\nrank 1: 0F0\n", "order of ranks"),
        ("schedule=x pp=1 vpp=1 microbatches=1 forward_only=yes\nrank 0: 0G0\n", "no action"),
        ("schedule=x pp=1 vpp=1 microbatches=1 forward_only=yes\nrank 0: 0F\n", "no action"),
        ("schedule=x pp=1 vpp=1 microbatches=1 forward_only=yes placement=v\nrank 0: 0F0\n", "two model chunks"),
    ],
)
def test_unreadable_texts_are_refused(text: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        from_text(text)


@pytest.mark.parametrize("kind", Kind)
def test_an_action_round_trips(kind: Kind) -> None:
    assert Action.parse(str(Action(kind, 12, 345))) == Action(kind, 12, 345)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4))
def test_a_placement_gives_each_stage_one_place(pp: int, vpp: int) -> None:
    placement = Placement(pp, vpp)
    stages = [stage for rank in range(pp) for stage in placement.stages_on(rank)]
    assert stages == [placement.stage_of(rank, chunk) for rank in range(pp) for chunk in range(vpp)]
    assert sorted(stages) == list(range(placement.num_stages))
    for stage in stages:
        assert placement.stage_of(placement.rank_of(stage), placement.chunk_of(stage)) == stage


def test_what_feeds_an_action() -> None:
    schedule = schedules.interleaved(2, 2, 2)

    def fed_by(kind: Kind, stage: int) -> tuple[int, Kind] | None:
        source = schedule.input_of(stage, Action(kind, schedule.placement.chunk_of(stage), 7))
        assert source is None or source.microbatch == 7
        return source and (source.stage, source.kind)

    assert [fed_by(Kind.F, stage) for stage in range(4)] == [None, (0, Kind.F), (1, Kind.F), (2, Kind.F)]
    assert [fed_by(Kind.B, stage) for stage in range(4)] == [(1, Kind.B), (2, Kind.B), (3, Kind.B), None]
    assert [fed_by(Kind.I, stage) for stage in range(4)] == [(1, Kind.B), (2, Kind.B), (3, Kind.B), None]
    assert [fed_by(Kind.W, stage) for stage in range(4)] == [None] * 4


def test_both_kinds_of_backward_hand_on_the_same_gradient() -> None:
    assert Schedule.output_of(2, Action(Kind.F, 0, 5)) == Output(2, Kind.F, 5)
    assert (
        Schedule.output_of(2, Action(Kind.I, 0, 5))
        == Schedule.output_of(2, Action(Kind.B, 0, 5))
        == Output(2, Kind.B, 5)
    )
    assert Schedule.output_of(2, Action(Kind.W, 0, 5)) is None


@pytest.mark.parametrize(
    ("name", "vpp", "meant"),
    [("auto", 1, "1f1b"), ("auto", 3, "interleaved"), ("gpipe", 1, "gpipe"), ("interleaved", 2, "interleaved")],
)
def test_names_are_resolved(name: str, vpp: int, meant: str) -> None:
    assert schedules.resolve(name, vpp) == meant
    assert schedules.build(name, 2, vpp, 4) == schedules.build(meant, 2, vpp, 4)


@pytest.mark.parametrize(("name", "vpp"), [("1f1b", 2), ("gpipe", 2), ("zb-h1", 1)])
def test_a_schedule_that_the_rules_refuse_is_never_built(name: str, vpp: int) -> None:
    with pytest.raises(AssertionError):
        schedules.build(name, 2, vpp, 4)


@pytest.mark.parametrize("size", [(0, 1, 1), (1, 1, 0), (1, 0, 1)])
@pytest.mark.parametrize("name", schedules.BUILDERS)
def test_sizes_below_one_are_refused(name: str, size: tuple[int, int, int]) -> None:
    with pytest.raises(ScheduleError, match="at least 1"):
        schedules.build(name, *size)


def test_a_schedule_is_data() -> None:
    """Equal sizes give equal, hashable schedules: they may be the keys of a dictionary."""
    first, second = schedules.interleaved(4, 2, 8), schedules.interleaved(4, 2, 8)
    assert first == second and len({first, second}) == 1 and isinstance(first, Schedule)
