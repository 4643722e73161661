"""A console for tables of which nothing is cut."""

from rich.console import Console

WIDTH = 200
"""Columns where the output is no terminal: a table takes what it needs of them."""


def wide_console() -> Console:
    """Return a console as wide as its terminal; in a pipe or a file, as wide as any table of ours."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH
    return console
