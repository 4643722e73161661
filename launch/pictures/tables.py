"""Builds tables for a terminal, and lines of a text whose cells are aligned."""

from collections.abc import Collection, Container, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table


def terminal_table(*columns: str, names: Collection[str] = (), title: str | None = None) -> Table:
    """Build a table without rows.

    Args:
        columns: headings. Columns of numbers are at the right and stay whole.
        names: headings of columns with names, which are at the left and may fold.
        title: line above the table, which then also has rules.
    """
    is_boxed = title is not None
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD if is_boxed else None, pad_edge=is_boxed)
    for column in columns:
        is_name = column in names
        table.add_column(column, justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold")
    return table


def aligned(rows: Sequence[Sequence[str]], left: Container[int]) -> Iterator[str]:
    """Yield rows of equally many cells as lines. Columns are aligned at the right, but those numbered in `left` at the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        words = [cell.ljust(width) if at in left else cell.rjust(width) for at, (cell, width) in enumerate(cells)]
        yield "  ".join(words).rstrip()
