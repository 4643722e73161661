"""The lines and the page that people read."""

from collections.abc import Sequence
from dataclasses import replace

from tests.soak.faults import Kind, draw
from tests.soak.judge import expected_of, problems
from tests.soak.scene import Settings
from tests.soak.supervisor import Verdict
from tests.soak.table import HEADINGS, RIGHT, WRONG, cells, lines, page, summary
from tests.soak.test_judge import flawless

SETTINGS = Settings()


def verdicts_of(kinds: Sequence[Kind]) -> list[Verdict]:
    verdicts = []
    for fault in draw(1, len(kinds), kinds):
        expected = expected_of(fault, SETTINGS, in_background=False)
        seen = flawless(expected)
        verdicts.append(Verdict(fault, expected, seen, problems(expected, seen)))
    return verdicts


def spoiled(verdict: Verdict) -> Verdict:
    seen = replace(verdict.seen, lost=99)
    return replace(verdict, seen=seen, problems=problems(verdict.expected, seen))


def test_a_line_has_a_cell_for_each_heading_and_says_what_is_wrong_below() -> None:
    for verdict in verdicts_of(list(Kind)):
        assert len(cells(verdict)) == len(HEADINGS)
        assert cells(verdict)[-1] == RIGHT and "\n" not in lines(verdict)
        assert cells(spoiled(verdict))[-1] == WRONG and "99 steps lost" in lines(spoiled(verdict))


def test_the_summary_counts_and_says_whether_the_weights_are_the_same() -> None:
    right, other = verdicts_of([Kind.NAN, Kind.PREEMPT])
    text = " ".join(summary([right, spoiled(other)], is_same=False, steps=70, seconds=120.0))
    assert "1 of 2 faults" in text and "are NOT those" in text and "99 at most" in text
    assert "bit by bit" in " ".join(summary([right], is_same=True, steps=70, seconds=1.0))
    assert "compared with nothing" in " ".join(summary([right], is_same=None, steps=0, seconds=1.0))


def test_the_page_has_all_faults_and_their_bounds_and_no_paths() -> None:
    verdicts = verdicts_of(list(Kind))
    verdicts[0] = spoiled(verdicts[0])
    text = page(verdicts, summary(verdicts, True, 70, 60.0), "python -m tests.soak --seed 1", SETTINGS)
    assert all(text.count(f"| {kind.value} |") == 1 and f"| `{kind.value}` |" in text for kind in Kind)
    assert "python -m tests.soak --seed 1" in text and "99 steps lost" in text
    assert "/tmp" not in text and max(map(len, text.splitlines())) < 250
