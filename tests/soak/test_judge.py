"""The judge says no whenever something is not as it must be, and no sooner. The CI tier asks it about one kind of fault."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.soak.faults import Fault, Kind, draw
from tests.soak.judge import Expected, Seen, expected_of, names_as_awaited, names_the_link, problems, step_of
from tests.soak.scene import LEAVING_SECONDS, SAMPLES_PER_STEP, SAVE_INTERVAL, Settings
from triaxis.engine.data.skipped import SkippedRanges
from triaxis.engine.resilience.hang.watch import StillLimit

SETTINGS = Settings(hang_seconds=5.0)


def with_slow(kinds: Iterable[Kind]) -> list[Any]:
    """Parameters of a test of which all but one are left to the slow tier."""
    return [pytest.param(kind, marks=[] if kind is Kind.KILL_RANK else pytest.mark.slow) for kind in kinds]


def fault_of(kind: Kind) -> Fault:
    return replace(draw(1, 1, [kind])[0], rank=3)


def flawless(expected: Expected) -> Seen:
    """What comes of a fault when all is as it must be, at the very edge of what may be."""
    return Seen(
        step=20,
        source="somewhere",
        told=" .. ".join(expected.words),
        ranks=expected.ranks,
        after=expected.bound.most,
        ended_after=None if expected.exit_codes is None else expected.bound.most,
        exit_codes=expected.exit_codes,
        lost=expected.most_lost,
    )


@pytest.mark.parametrize("kind", with_slow(Kind))
@pytest.mark.parametrize("in_background", [False, True])
def test_what_is_as_it_must_be_is_right(kind: Kind, in_background: bool) -> None:
    expected = expected_of(fault_of(kind), SETTINGS, in_background=in_background)
    assert problems(expected, flawless(expected)) == []


def late(seen: Seen, expected: Expected) -> None:
    seen.after = expected.bound.most + 0.1


def wrong_rank(seen: Seen, expected: Expected) -> None:
    seen.ranks = frozenset({2})


def one_rank_too_many(seen: Seen, expected: Expected) -> None:
    seen.ranks = frozenset({0, *(expected.ranks or ())})


def unnoticed(seen: Seen, expected: Expected) -> None:
    seen.source = ""


def wordless(seen: Seen, expected: Expected) -> None:
    seen.told = " .. ".join(expected.words[:-1])


def another_end(seen: Seen, expected: Expected) -> None:
    seen.exit_codes = (0, 2)


def too_many_lost(seen: Seen, expected: Expected) -> None:
    seen.lost = expected.most_lost + 1


def not_resumed(seen: Seen, expected: Expected) -> None:
    seen.lost = None


def ahead(seen: Seen, expected: Expected) -> None:
    seen.lost = -1


def left_over(seen: Seen, expected: Expected) -> None:
    seen.left = ["python 4711"]


def another_step(seen: Seen, expected: Expected) -> None:
    seen.wrong.append("step 7 named, not 8")


@pytest.mark.parametrize("kind", with_slow(Kind))
@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (late, "reported after"),
        (wrong_rank, "named, not"),
        (one_rank_too_many, "named, not"),
        (unnoticed, "it was not reported"),
        (wordless, "not reported"),
        (another_end, "exit codes 0 2"),
        (too_many_lost, "steps lost, at most"),
        (not_resumed, "did not go on"),
        (ahead, "after the last one"),
        (left_over, "left over: python 4711"),
        (another_step, "step 7 named"),
    ],
)
def test_one_thing_that_is_not_is_wrong_and_told(
    kind: Kind, spoil: Callable[[Seen, Expected], None], word: str
) -> None:
    expected = expected_of(fault_of(kind), SETTINGS, in_background=True)
    seen = flawless(expected)
    spoil(seen, expected)
    [problem] = problems(expected, seen)
    assert word in problem


ENDING = [kind for kind in Kind if expected_of(fault_of(kind), SETTINGS, in_background=False).exit_codes is not None]


@pytest.mark.parametrize("kind", with_slow(ENDING))
def test_an_end_that_comes_late_or_never_is_wrong(kind: Kind) -> None:
    expected = expected_of(fault_of(kind), SETTINGS, in_background=False)
    seen = flawless(expected)
    seen.ended_after = expected.bound.most + 0.1
    assert "ended after" in problems(expected, seen)[0]
    seen.ended_after, seen.exit_codes = None, (None, None)
    assert [text.split()[0] for text in problems(expected, seen)] == ["exit", "it"]


@pytest.mark.slow
def test_a_preemption_loses_nothing_and_a_fault_at_most_an_interval() -> None:
    def lost(kind: Kind, *, in_background: bool) -> int:
        return expected_of(fault_of(kind), SETTINGS, in_background=in_background).most_lost

    for kind in (Kind.PREEMPT, Kind.STOP_IN_VALIDATION, Kind.REMOVED_RUN_DIR, Kind.PAUSED_TERMINAL, Kind.FULL_LOG_DISK):
        assert lost(kind, in_background=True) == 0
    assert lost(Kind.KILL_RANK, in_background=False) == SAVE_INTERVAL < lost(Kind.KILL_RANK, in_background=True)


@pytest.mark.slow
def test_kinds_that_end_a_run_are_the_documented_ones() -> None:
    assert set(Kind) - set(ENDING) == {
        Kind.NAN,
        Kind.SLOW_RANK,
        Kind.FULL_DISK,
        Kind.PAUSED_TERMINAL,
        Kind.FULL_LOG_DISK,
    }


@pytest.mark.slow
def test_codes_belong_to_hosts() -> None:
    expected = expected_of(fault_of(Kind.KILL_RANK), SETTINGS, in_background=False)
    assert expected.exit_codes == (1, 137), "rank 3 is on host 1"
    assert expected_of(replace(fault_of(Kind.KILL_RANK), rank=0), SETTINGS, in_background=False).exit_codes == (137, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "is_named"),
    [
        ("rank 0 (pp 0, dp 0, tp 0) waits for the backward of microbatch 2 from rank 2", True),
        ("rank 3 (pp 1, dp 1, tp 0) waits until rank 1 takes its activation gradients", True),
        ("rank 0 (pp 0, dp 0, tp 0) waits for ranks 1, 2 in the all_reduce over world (step), in the optimizer", True),
        ("the all_reduce over world (step) is between node 0 (ranks 0, 1) and node 1 (ranks 2, 3)", True),
        ("rank 2 (pp 1, dp 0, tp 0) waits for rank 3 in the reduce_scatter over dp (gradients)", False),
        ("every rank is in the same call as its peers and it does not end: a link or the backend has failed", False),
    ],
)
def test_a_report_of_a_cut_link_names_both_sides(line: str, is_named: bool) -> None:
    assert names_the_link(f"the run hangs in step 7: nothing has moved for 5 seconds.\n  {line}") is is_named


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "is_named"),
    [
        ("rank 1 (pp 0, dp 1, tp 0) waits for the backward of microbatch 2 from rank 3", True),
        ("rank 1 (pp 0, dp 1, tp 0) waits until rank 3 takes its activations", True),
        ("rank 0 (pp 0, dp 0, tp 0) waits for ranks 1, 3 in the all_reduce over world (validation)", True),
        ("rank 0 (pp 0, dp 0, tp 0) waits for ranks 1, 2 in the all_reduce over world (validation)", False),
        ("rank 3 (pp 1, dp 1, tp 0) waits for the forward of microbatch 2 from rank 1", False),
    ],
)
def test_a_stopped_rank_is_awaited_by_another(line: str, is_named: bool) -> None:
    report = f"the run hangs in step 7: nothing has moved for 5 seconds.\n  rank 3 (pp 1, dp 1, tp 0) does not answer\n  {line}"
    assert names_as_awaited(3, report) is is_named


@pytest.mark.slow
def test_the_step_of_a_sample_does_not_count_those_that_are_left_out() -> None:
    skipped = SkippedRanges.of([(8, 16), (48, 56)])
    for position in range(80):
        assert step_of(skipped.id_at(position), skipped) == position // SAMPLES_PER_STEP + 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.KILL_RANK, Kind.KILL_NODE, Kind.STOP_RANK, Kind.CUT_LINK])
def test_the_bound_of_a_hang_follows_the_watch_of_the_ranks(kind: Kind) -> None:
    limits, limit = SETTINGS.limits, StillLimit(SETTINGS.limits)
    for slowest_seconds in (0.0, 2.4, 2.6, 9.0):
        limit.went_on(begun=10, still_seconds=slowest_seconds)
        end_seconds = limits.end_seconds - limits.still_seconds + limit.seconds(begun=11)
        expected = expected_of(fault_of(kind), SETTINGS, in_background=False, slowest_seconds=slowest_seconds)
        assert expected.bound.most == pytest.approx(end_seconds + LEAVING_SECONDS)


@pytest.mark.slow
def test_bounds_follow_from_the_configuration() -> None:
    def bound(kind: Kind, hang_seconds: float) -> float:
        return expected_of(fault_of(kind), Settings(hang_seconds), in_background=False).bound.most

    for kind in (Kind.KILL_RANK, Kind.STOP_RANK, Kind.CUT_LINK, Kind.NAN, Kind.FLIP_BIT, Kind.FULL_DISK):
        assert bound(kind, 5.0) < bound(kind, 10.0)
