"""A console for tables that must not be truncated."""

from rich.console import Console

WIDTH = 200
"""Columns if the output is not a terminal; a table uses as many as it needs."""


def wide_console() -> Console:
    """Return a console as wide as its terminal. In a pipe or a file, it is wide enough for any Triaxis table."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH
    return console
