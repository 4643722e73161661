"""Compute how much faster more ranks train the same global batch.

The loss against the ideal is divided among the parts of a step.

Let T(n) be the seconds per step on n ranks, t(n) the seconds of one part of that step, and m the fewest ranks that were measured.

    speed-up           S(n) = T(m) / T(n)            n / m would be ideal
    efficiency         E(n) = S(n) m / n             the loss is 1 - E(n)
    loss to a part     (t(n) - t(m) m / n) / T(n)    the losses to all parts add up to 1 - E(n)

A negative loss means that more ranks shortened the part by more than n / m.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from triaxis.engine.errors import counted
from triaxis.launch.pictures.drawing import element, text, write_picture
from triaxis.launch.pictures.style import COLOURS
from triaxis.launch.pictures.tables import aligned
from triaxis.launch.tuning.layouts import LayoutResult

LEAST_LOST = 0.005
"""Parts whose loss or gain is a smaller share of the step are left out of the text."""

BAR, GAP, HEIGHT, LEFT, TOP = 56, 44, 220, 60, 70
"""Sizes in the picture, in pixels: bar width, room between bars, axis height, margins."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """Results with one number of ranks, compared with the fewest ranks.

    Attributes:
        tokens_per_second: tokens per second over all ranks.
        speed_up: speed-up over the fewest ranks.
        efficiency: share of the ideal speed-up; 1 for the fewest ranks.
        lost: share of a step that is lost to each part, such as `bubble`; with the efficiency, the shares add up to 1.
    """

    num_ranks: int
    tokens_per_second: float
    speed_up: float
    efficiency: float
    lost: Mapping[str, float]


def scaling_of(measured: Sequence[LayoutResult]) -> list[Scaling]:
    """Compute the speed-up for each number of ranks, the fewest first.

    Args:
        measured: runs with one global batch, each on another number of ranks.
    """
    first, *more = sorted(measured, key=lambda one: one.num_ranks)
    rows = []
    for one in (first, *more):
        fewer = first.num_ranks / one.num_ranks
        speed_up = first.step_seconds / one.step_seconds
        lost = {part: share - first.time[part] * speed_up * fewer for part, share in one.time.items()}
        rows.append(Scaling(one.num_ranks, one.tokens_per_second, speed_up, speed_up * fewer, lost))
    return rows


def scaling_text(rows: Sequence[Scaling]) -> str:
    """Format a table with a line per number of ranks. The last line explains the columns."""
    cells = [("ranks", "tokens/s", "speed-up", "efficiency", "lost to")]
    cells += [
        (
            str(row.num_ranks),
            f"{row.tokens_per_second:,.0f}",
            f"{row.speed_up:.2f}",
            f"{row.efficiency:.0%}",
            ", ".join(f"{part} {share:.0%}" for part, share in _largest(row)),
        )
        for row in rows
    ]
    return "\n".join(
        [
            f"speed-up over {counted(rows[0].num_ranks, 'rank')}, one global batch:",
            *aligned(cells, left=(4,)),
            "efficiency = speed-up / its ideal; efficiency and all losses add up to 100 % of a step.",
            "",
        ]
    )


def _largest(row: Scaling) -> Iterator[tuple[str, float]]:
    for part, share in sorted(row.lost.items(), key=lambda item: -abs(item[1])):
        if abs(share) >= LEAST_LOST:
            yield part.removeprefix("exposed_"), share


def draw_scaling(rows: Sequence[Scaling], title: str, path: Path) -> None:
    """Write a picture with a bar per number of ranks, stacked from efficiency and losses.

    The speed-up is printed above the bar. Negative losses are not drawn.

    Raises:
        TriaxisError: `path` does not end in .svg, or cannot be written.
    """
    parts = list(dict.fromkeys(part for row in rows for part, share in row.lost.items() if share >= LEAST_LOST))
    colours = dict(zip(["efficiency", *parts], COLOURS, strict=False))
    # A part that became faster makes the stack taller than a whole step.
    tallest = max(row.efficiency + sum(max(0.0, row.lost[part]) for part in parts) for row in rows)
    width = LEFT + len(rows) * (BAR + GAP) + 150
    drawn = [text(title, LEFT, 24, 15, weight="bold")]
    for share in (0.0, 0.5, 1.0):
        y = TOP + HEIGHT * (1 - share / tallest)
        drawn.append(element("line", x1=LEFT, x2=width - 150, y1=y, y2=y, stroke="#dddddd"))
        drawn.append(text(f"{share:.0%}", LEFT - 8, y, 11, anchor="end", fill="#555555"))
    for place, row in enumerate(rows):
        x, y = LEFT + GAP / 2 + place * (BAR + GAP), float(TOP + HEIGHT)
        for part, share in [("efficiency", row.efficiency), *((part, row.lost[part]) for part in parts)]:
            height = HEIGHT * max(0.0, share) / tallest
            y -= height
            drawn.append(element("rect", x=x, y=y, width=BAR, height=height, fill=colours[part]))
        drawn.append(text(f"{row.speed_up:.2f} x", x + BAR / 2, y - 12, 13, anchor="middle", weight="bold"))
        drawn.append(text(counted(row.num_ranks, "rank"), x + BAR / 2, TOP + HEIGHT + 16, 12, anchor="middle"))
    for place, (part, colour) in enumerate(colours.items()):
        x, y = width - 135, TOP + 10 + 20 * place
        drawn.append(element("rect", x=x, y=y - 6, width=12, height=12, fill=colour))
        name = part if part == "efficiency" else f"lost to {part.removeprefix('exposed_')}"
        drawn.append(text(name, x + 18, y, 12))
    write_picture(path, width, TOP + HEIGHT + 36, title, drawn)
