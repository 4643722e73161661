"""Draws each pipeline rank's memory as a bar of colored letters, one letter per kind.

pp 0  |ppppggggggggoooaaaaaaaaaaaaaaac.....|  67.6 GB
"""

from rich.style import Style
from rich.text import Text

from triaxis.engine.telemetry.outlets.format import gigabytes
from triaxis.launch.pictures.style import COLOURS
from triaxis.models.predict.rank_memory import KINDS, Memory, Prediction

COLUMNS = 48
"""Width of a bar that represents a device's whole usable memory."""
MOST_RANKS = 16
"""Most pipeline ranks to show one by one; beyond that, only the first and the last ones are shown."""
_FREE = "."


def memory_bar(held: Memory, usable_bytes: int, columns: int = COLUMNS) -> Text:
    """Draw a rank's memory as a bar, in which `columns` cells stand for `usable_bytes`.

    A cell shows the first letter of its kind of memory.
    """
    bar, below = Text().append("|", style="dim"), 0
    for number, kind in enumerate(KINDS):
        start, below = below, below + getattr(held, kind)
        cells = round(below / usable_bytes * columns) - round(start / usable_bytes * columns)
        bar.append(kind[0] * cells, style=Style(color="#ffffff", bgcolor=COLOURS[number]))
    free = columns - round(below / usable_bytes * columns)
    return bar.append(_FREE * free + "|", style="dim")


def memory_lines(memory: Prediction, usable_bytes: int) -> list[Text]:
    """Draw a bar for each pipeline rank, and a legend for the letters below the bars."""
    lines = [
        Text.assemble(f"  pp {pp:<3} ", memory_bar(held, usable_bytes), f" {gigabytes(held.total):>9}")
        for pp, held in enumerate(memory.ranks)
    ]
    if len(lines) > MOST_RANKS:
        half = MOST_RANKS // 2
        lines[half:-half] = [Text(f"  ... {len(lines) - MOST_RANKS} more ...")]
    key = Text("  ")
    for number, kind in enumerate(KINDS):
        if any(getattr(held, kind) for held in memory.ranks):
            key.append(kind[0], style=Style(color="#ffffff", bgcolor=COLOURS[number])).append(f" {kind}  ")
    return [*lines, key.append(f"{_FREE} free, of {gigabytes(usable_bytes)}", style="dim")]
