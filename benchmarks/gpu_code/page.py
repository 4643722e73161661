"""The tables on docs/one-gpu.md that are made from the committed numbers."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_code.golden import Golden
from benchmarks.gpu_code.table import table
from benchmarks.roofline import text

PAGE = Path(__file__).resolve().parents[2] / "docs" / "one-gpu.md"


def tables(golden: Golden) -> Iterator[str]:
    """Yield the tables in the order of the page."""
    yield table(golden)
    yield from text(golden).split("\n\n")


def with_tables(page: str, golden: Golden) -> str:
    """Return the page with each table in the place of the one that has its heading.

    Raises:
        ValueError: the page has no table with such a heading.
    """
    lines = page.split("\n")
    for each in tables(golden):
        new = each.split("\n")
        start = lines.index(new[0])
        end = next(place for place in range(start, len(lines)) if not lines[place].startswith("|"))
        lines[start:end] = new
    return "\n".join(lines)
