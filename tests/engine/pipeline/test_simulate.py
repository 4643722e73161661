"""Event timing: by hand, against the bubble formulas, against a published table."""

import re
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.style import Style

from tests.engine.pipeline.published_bubbles import Published, published_bubbles
from triaxis.engine.errors import ScheduleError
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Schedule
from triaxis.engine.pipeline.simulate import Costs, SimulatedTimeline, simulate
from triaxis.engine.pipeline.text import from_text, render_timeline

LARGEST_INTERLEAVED_DIFFERENCE = 0.0035
"""The table's interleaved column lies that far off the event model, for a reason that the paper does not tell."""


@pytest.mark.parametrize("row", published_bubbles())
def test_the_bubbles_of_a_paper_to_four_digits(row: Published) -> None:
    for name in ("1f1b", "zb_h1"):
        timeline = simulate(schedules.build(name, row.p, 1, row.m), row.costs())
        assert round(timeline.largest_bubble_fraction, 4) == pytest.approx(row.bubbles[name], abs=1e-9), name


@pytest.mark.parametrize("row", published_bubbles())
def test_the_interleaved_bubbles_of_a_paper(row: Published) -> None:
    timeline = simulate(schedules.interleaved(row.p, row.chunks, row.m), row.costs(row.chunks))
    published = row.bubbles["interleaved"]
    assert timeline.largest_bubble_fraction == pytest.approx(published, abs=LARGEST_INTERLEAVED_DIFFERENCE)


def over_ideal(schedule: Schedule) -> float:
    """span / ideal - 1, the ideal being what each rank computes."""
    timeline = simulate(schedule, Costs.uniform(schedule.placement.num_stages))
    return timeline.span / timeline.busy(0) - 1


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 8), (8, 8), (8, 13), (4, 64)])
def test_bubbles_of_1f1b_and_gpipe_are_p_minus_1_over_m(p: int, m: int) -> None:
    assert over_ideal(schedules.one_f_one_b(p, m)) == pytest.approx((p - 1) / m)
    assert over_ideal(schedules.gpipe(p, m)) == pytest.approx((p - 1) / m)


@pytest.mark.parametrize(("p", "v", "m"), [(1, 3, 2), (2, 2, 2), (2, 2, 4), (4, 2, 8), (4, 3, 4), (8, 4, 16)])
def test_the_interleaved_bubble_is_p_minus_1_over_v_m(p: int, v: int, m: int) -> None:
    assert over_ideal(schedules.interleaved(p, v, m)) == pytest.approx((p - 1) / (v * m))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 17))
def test_a_partial_group_costs_no_more_than_a_whole_one(p: int, v: int, m: int) -> None:
    def span(num_microbatches: int) -> float:
        return simulate(schedules.interleaved(p, v, num_microbatches), Costs.uniform(p * v)).span

    whole = -(-m // p) * p
    assert span(m) <= span(whole)


def rows_of(timeline: SimulatedTimeline) -> list[list[tuple[str, float, float]]]:
    return [[(str(each.action), each.start, each.end) for each in row] for row in timeline.intervals]


def test_by_hand() -> None:
    """Two stages of different costs and a latency: each start is the later of the rank and the data."""
    costs = Costs(forward=(2, 3), input_grad=(2, 4), weight_grad=(1, 2), transfer=0.5)
    timeline = simulate(schedules.one_f_one_b(2, 2), costs)
    assert rows_of(timeline) == [
        [("0F0", 0, 2), ("0F1", 2, 4), ("0B0", 12, 15), ("0B1", 21, 24)],
        [("0F0", 2.5, 5.5), ("0B0", 5.5, 11.5), ("0F1", 11.5, 14.5), ("0B1", 14.5, 20.5)],
    ]
    assert timeline.span == 24
    assert timeline.busy(0) == 10 and timeline.bubble_fraction(0) == pytest.approx(14 / 24)
    assert timeline.largest_bubble_fraction == pytest.approx(14 / 24)


SPLIT = """schedule=split pp=2 vpp=1 microbatches=2 forward_only=no
rank 0: 0F0 0F1 0I0 0W0 0I1 0W1
rank 1: 0F0 0I0 0F1 0I1 0W0 0W1
"""


def test_a_deferred_weight_gradient_does_not_hold_up_the_rank_before() -> None:
    timeline = simulate(from_text(SPLIT), Costs.uniform(2))
    assert rows_of(timeline) == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0I0", 3, 4), ("0W0", 4, 5), ("0I1", 5, 6), ("0W1", 6, 7)],
        [("0F0", 1, 2), ("0I0", 2, 3), ("0F1", 3, 4), ("0I1", 4, 5), ("0W0", 5, 6), ("0W1", 6, 7)],
    ]
    assert timeline.span < simulate(schedules.one_f_one_b(2, 2), Costs.uniform(2)).span


def test_a_hand_over_on_one_rank_has_no_latency() -> None:
    slow = Costs.uniform(3, transfer=100)
    assert simulate(schedules.interleaved(1, 3, 2), slow).span == 3 * 2 * 3


def test_costs_for_other_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match="forward has 2 entries and the schedule 4 stages"):
        simulate(schedules.interleaved(2, 2, 4), Costs.uniform(2))


def test_a_circle_is_refused_with_the_place() -> None:
    circle = from_text("schedule=circle pp=2 vpp=2 microbatches=1 forward_only=yes\nrank 0: 1F0 0F0\nrank 1: 0F0 1F0\n")
    with pytest.raises(ScheduleError, match="rank 0 stops at 1F0, which needs the output of stage 1, microbatch 0"):
        simulate(circle, Costs.uniform(4))


PICTURE = """\
rank 0 |F0 F1 F2 ............B0=== ...B1=== ...B2=== |
rank 1 |...F0 F1 ......B0=== F2 B1=== ...B2=== ......|
rank 2 |......F0 B0=== F1 B1=== F2 B2=== ............|
F forward   B= backward   . idle
span 15, idle at most 40.0% of it on a rank"""


def test_the_picture() -> None:
    assert render_timeline(simulate(schedules.one_f_one_b(3, 3), Costs.uniform(3))).plain == PICTURE


def test_each_kind_has_a_colour_in_a_terminal_and_none_in_a_pipe() -> None:
    picture = render_timeline(simulate(schedules.build("zb_h1", 2, 1, 3), Costs.uniform(2)))
    colours = {}
    for span in picture.spans:
        if isinstance(span.style, Style) and span.style.bgcolor is not None:
            colours.setdefault(picture.plain[span.start], set()).add(span.style.bgcolor.name)
    assert {kind: len(used) for kind, used in colours.items()} == {"F": 1, "I": 1, "W": 1}
    assert len(set.union(*colours.values())) == 3
    for is_terminal in (True, False):
        console = Console(file=StringIO(), force_terminal=is_terminal, width=200, _environ={})
        console.print(picture)
        assert ("\x1b[" in console.file.getvalue()) is is_terminal


@pytest.mark.parametrize("width", [20, 47, 80, 200])
def test_a_picture_fits_the_screen_and_loses_nothing(width: int) -> None:
    timeline = simulate(schedules.interleaved(4, 2, 8), Costs.uniform(8))
    whole, folded = render_timeline(timeline).plain.splitlines(), render_timeline(timeline, width).plain.splitlines()
    rows = [line for line in folded if line.startswith("rank")]
    assert max(map(len, rows)) <= width
    for rank in range(4):
        pieces = [
            line.removeprefix(f"rank {rank} |").removesuffix("|") for line in rows if line.startswith(f"rank {rank}")
        ]
        assert "".join(pieces) == whole[rank].removeprefix(f"rank {rank} |").removesuffix("|")
        assert len(re.findall(r"\d[FB]\d", " ".join(pieces))) == 4 * 8
