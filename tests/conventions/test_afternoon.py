"""docs/afternoon.md: one training step stays an afternoon's reading, and its line counts are right."""

import re

from tests.documented import ROOT

PAGE = ROOT / "docs" / "afternoon.md"
MOST_FILES, MOST_LINES = 28, 4900


def listed() -> dict[str, int]:
    """Return the files of the page with the lines that it gives for each."""
    rows = re.findall(r"^\| \[(\S+)\]\(\.\./\1\) \| (\d+) \| \S.*\|$", PAGE.read_text(), flags=re.MULTILINE)
    return {path: int(lines) for path, lines in rows}


def test_a_training_step_is_an_afternoon() -> None:
    counted = {path: len((ROOT / path).read_text().splitlines()) for path in listed()}
    assert len(counted) <= MOST_FILES and sum(counted.values()) <= MOST_LINES, counted


def test_the_page_counts_lines_to_the_nearest_ten() -> None:
    """Rounded, so that a small change of a file need not change the page."""
    off = {
        path: f"{given}, has {lines}"
        for path, given in listed().items()
        if abs(given - (lines := len((ROOT / path).read_text().splitlines()))) > 5
    }
    assert not off


def test_the_page_opens_with_the_sum() -> None:
    total = sum(listed().values())
    assert f"is {len(listed())} files and {total:,} lines" in PAGE.read_text(), (len(listed()), total)
