"""Draws line, dot, column and bar charts as inline SVG.

A chart has CSS classes instead of colours. The page's CSS defines the colours (`--c0` .. `--c11`). Every text is escaped here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from triaxis.engine.telemetry.outlets.format import significant
from triaxis.launch.pictures.style import NUM_COLOURS

Point = tuple[float, float]

WIDTH, HEIGHT = 1110, 300
"""Size of a chart that fills the page's width, in viewBox units: pixels at the page's full width."""
SMALL_WIDTH, SMALL_HEIGHT = 540, 220
"""Size of a chart that stands next to another one, in the same units."""
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40
MOST_POINTS = 1500
"""Largest number of points in a line, about; `thinned` reduces longer ones."""


@dataclass(frozen=True, slots=True)
class Line:
    """A curve in a chart.

    Attributes:
        name: name in the legend.
        points: (x, y) with ascending x; a y that is not finite makes a gap.
        style: CSS classes: c0 .. c11 for the colour, then optionally `broad`, `dashed` or `dots` (no line).
    """

    name: str
    points: Sequence[Point]
    style: str


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """List at most `most` + 1 round numbers from `low` to `high`, or `low` alone if `high` is not above it.

    They are multiples of 1, 2 or 5 times a power of ten.
    """
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Reduce a line to about `most` points without losing a spike or a gap. The line keeps its two ends."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        finite = [place for place, (_, y) in enumerate(group) if math.isfinite(y)]
        places = {min(finite, key=lambda i: group[i][1]), max(finite, key=lambda i: group[i][1])} if finite else set()
        gap = next((place for place, (_, y) in enumerate(group) if not math.isfinite(y)), None)
        places |= {gap} if gap is not None else set()
        places |= {0} if start == 0 else {len(group) - 1} if start + size >= len(points) else set()
        kept += [group[place] for place in sorted(places)]
    return kept


class _Frame:
    """A chart's axes and grid; the methods `x` and `y` map values to pixels."""

    def __init__(
        self, x_range: Point, y_range: Point, *, small: bool = False, x_label: str = "step", y_label: str = ""
    ) -> None:
        self.x_range, self.y_range = x_range, y_range
        self.width, self.height = (SMALL_WIDTH, SMALL_HEIGHT) if small else (WIDTH, HEIGHT)
        self.x_label, self.y_label = x_label, y_label

    def x(self, value: float) -> float:
        low, high = self.x_range
        return round(LEFT + (value - low) / (high - low or 1) * (self.width - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return round(self.height - BOTTOM - (value - low) / (high - low or 1) * (self.height - TOP - BOTTOM), 1)

    def svg(self, label: str, inside: Sequence[str]) -> str:
        parts = [f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(label)}">']
        for value in ticks(*self.y_range, most=5):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{tick(value)}</text>')
        bottom = self.height - BOTTOM
        for value in ticks(*self.x_range, most=8):
            x = self.x(value)
            parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>')
            parts.append(f'<text class="tick" x="{x}" y="{bottom + 17}" text-anchor="middle">{tick(value)}</text>')
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
        parts.append(
            f'<text class="tick" x="{(LEFT + self.width - RIGHT) / 2}" y="{self.height - 5}" '
            f'text-anchor="middle">{escape(self.x_label)}</text>'
        )
        if self.y_label:
            parts.append(f'<text class="tick" x="{LEFT + 8}" y="{TOP + 10}">{escape(self.y_label)}</text>')
        drawn = "".join([*parts, *inside, "</svg>"])
        return drawn if self.width < WIDTH else scrolling(drawn)


def scrolling(svg: str) -> str:
    """Wrap a chart of the page's width so that it scrolls sideways on a narrow screen."""
    return f'<div class="wide">{svg}</div>'


def tick(value: float) -> str:
    """Format a round number without superfluous digits: 12,000, 0.25, 3e-05."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e7:
        return f"{value:,.6g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return f"{value:.3g}"


def line_chart(
    label: str,
    lines: Sequence[Line],
    *,
    marks: Sequence[tuple[float, str]] = (),
    from_zero: bool = False,
    small: bool = False,
    x_label: str = "step",
) -> str:
    """Draw curves over a common x axis, with a legend for two or more.

    Args:
        label: description for readers who cannot see the chart.
        lines: curves, with at least one finite point among them.
        marks: (x, text) for vertical lines.
        from_zero: whether the y axis begins at 0 if no y is negative.
        small: whether the chart is half as wide as the page.
        x_label: label for the x axis.
    """
    finite = [(x, y) for line in lines for x, y in line.points if math.isfinite(y)]
    xs = [x for line in lines for x, _ in line.points]
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    y_range = (0.0, high + room) if from_zero and low >= 0 else (low - room, high + room)
    frame = _Frame((min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1), y_range, small=small, x_label=x_label)
    inside = []
    for x, text in marks:
        place = frame.x(x)
        inside.append(f'<g class="mark"><title>{escape(text)}</title>')
        inside.append(f'<line x1="{place}" x2="{place}" y1="{TOP}" y2="{frame.height - BOTTOM}"/></g>')
    for line in lines:
        inside.append(_curve(frame, line))
    legend = _legend(list({(line.style, line.name): None for line in lines})) if len(lines) > 1 else ""
    return legend + frame.svg(label, inside)


def _curve(frame: _Frame, line: Line) -> str:
    points = thinned(line.points)
    finite = [point for point in points if math.isfinite(point[1])]
    if "dots" in line.style or len(finite) == 1:
        return "".join(
            f'<circle class="{line.style}" cx="{frame.x(x)}" cy="{frame.y(y)}" r="3.2">'
            f"<title>{escape(line.name)}: {significant(y)} at {tick(x)}</title></circle>"
            for x, y in finite
        )
    runs: list[list[str]] = [[]]
    lost = []
    for x, y in points:
        if math.isfinite(y):
            runs[-1].append(f"{frame.x(x)},{frame.y(y)}")
        else:
            runs.append([])
            lost.append(
                f'<text class="lost" x="{frame.x(x)}" y="{TOP + 10}" text-anchor="middle">×<title>{escape(line.name)} '
                f"is {y} at {tick(x)}</title></text>"
            )
    drawn = [f'<polyline class="{line.style}" points="{" ".join(run)}"/>' for run in runs if run]
    return "".join([*drawn, *lost])


@dataclass(frozen=True, slots=True)
class Dot:
    """A dot in a scatter plot.

    Attributes:
        x, y: position, in the units of the axes.
        title: text shown when the mouse points at the dot.
        style: CSS classes: c0 .. c11 for the colour, then optionally `large`.
        label: text at the dot's lower left, or ""; left out if it would overlap another.
    """

    x: float
    y: float
    title: str
    style: str
    label: str = ""


def scatter_chart(
    label: str,
    dots: Sequence[Dot],
    kinds: Mapping[str, str],
    x_label: str,
    y_label: str,
    *,
    front: Sequence[Point] = (),
    limit: tuple[float, str] | None = None,
) -> str:
    """Draw dots over two axes that need not begin at 0.

    Args:
        label: description for readers who cannot see the chart.
        dots: at least one dot, in drawing order.
        kinds: meaning of each dot style, for the legend.
        x_label, y_label: axis labels, with units.
        front: corners of a Pareto front, drawn as a staircase, with ascending x and descending y.
        limit: (x, text) for a vertical line at the largest x allowed.
    """
    xs, ys = [dot.x for dot in dots] + ([limit[0]] if limit else []), [dot.y for dot in dots]
    room_x, room_y = ((max(of) - min(of)) * 0.06 or abs(max(of)) * 0.1 or 1.0 for of in (xs, ys))
    frame = _Frame(
        (max(0.0, min(xs) - room_x), max(xs) + room_x),
        (max(0.0, min(ys) - 2 * room_y), max(ys) + 2 * room_y),
        x_label=x_label,
        y_label=y_label,
    )
    inside = []
    if limit is not None:
        x = frame.x(limit[0])
        inside.append(
            f'<g class="mark"><line x1="{x}" x2="{x}" y1="{TOP}" y2="{frame.height - BOTTOM}"/></g>'
            f'<text class="tick" x="{x - 6}" y="{TOP + 10}" text-anchor="end">{escape(limit[1])}</text>'
        )
    if front:
        corners = [front[0]]
        for x, y in front[1:]:
            corners += [(x, corners[-1][1]), (x, y)]
        corners.append((frame.x_range[1], corners[-1][1]))
        drawn = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in corners)
        inside.append(f'<polyline class="c1" points="{drawn}"/>')
    taken: list[Point] = []
    for dot in dots:
        x, y, radius = frame.x(dot.x), frame.y(dot.y), 7 if "large" in dot.style else 4.5
        inside.append(
            f'<circle class="{dot.style}" cx="{x}" cy="{y}" r="{radius}"><title>{escape(dot.title)}</title></circle>'
        )
        # A dot on the front has no other dot at its lower left, so its label goes there. Labels that would overlap are left out.
        if dot.label and all(abs(x - left) > 16 or abs(y - top) > 11 for left, top in taken):
            taken.append((x, y))
            place = f'x="{x - radius:.1f}" y="{y + radius + 8:.1f}" text-anchor="end"'
            inside.append(f'<text class="tick" {place}>{escape(dot.label)}</text>')
    legend = _legend([(f"{style} dots", meaning) for style, meaning in kinds.items()])
    return legend + frame.svg(label, inside)


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    keys = "".join(f'<span><i class="{style}"></i>{escape(name)}</span>' for style, name in entries)
    return f'<p class="legend">{keys}</p>'


def stacked_chart(label: str, names: Sequence[str], columns: Sequence[tuple[float, float, Sequence[float]]]) -> str:
    """Draw columns, each a stack of parts in seconds.

    Args:
        label: chart description.
        names: part names, from the bottom up; the first has colour c0.
        columns: (first step, last step, seconds per part) with ascending steps; the last step is included.
    """
    highest = max(sum(values) for _, _, values in columns)
    frame = _Frame((columns[0][0] - 0.5, columns[-1][1] + 0.5), (0.0, highest * 1.04 or 1.0))
    inside = []
    for first, last, values in columns:
        left, right = frame.x(first - 0.5), frame.x(last + 0.5)
        below = 0.0
        for number, (name, value) in enumerate(zip(names, values, strict=True)):
            if value <= 0:
                continue
            top, bottom = frame.y(below + value), frame.y(below)
            at = tick(first) if first == last else f"{tick(first)} to {tick(last)}"
            inside.append(
                f'<rect class="c{number % NUM_COLOURS}" x="{left}" y="{top}" width="{max(right - left - 0.4, 0.4):.1f}" '
                f'height="{max(bottom - top, 0):.1f}"><title>{escape(name)}: {significant(value)} s, step {at}</title></rect>'
            )
            below += value
    return _legend([(f"c{number % NUM_COLOURS}", name) for number, name in enumerate(names)]) + frame.svg(label, inside)


Bar = tuple[str, Sequence[tuple[str, str, float, str]]]
"""A horizontal bar: text at its end, and its parts from the left, each (CSS class, meaning, length, its value as text)."""


def one_bar(style: str, what: str, length: float, show: Callable[[Any], str]) -> Bar:
    """Make a bar of one part; `show` formats a length with its unit."""
    return show(length), [(style, what, length, show(length))]


def bar_chart(label: str, rows: Sequence[tuple[str, Sequence[Bar]]], marks: Sequence[tuple[float, str]] = ()) -> str:
    """Draw horizontal bars, one or more per row.

    Args:
        label: chart description.
        rows: (name, bars). Lengths are relative to the longest bar's or the farthest mark's.
        marks: (value, text) for at most two vertical lines; the first has its text at the left, the second at the right.
    """
    bar, gap, left, right = 14, 8, 86, 116
    top = 22 if marks else gap
    height = top + sum(len(bars) * bar + gap for _, bars in rows)
    lengths = [sum(length for _, _, length, _ in parts) for _, bars in rows for _, parts in bars]
    scale = (WIDTH - left - right) / (max([*lengths, *(value for value, _ in marks), 0.0]) or 1.0)
    drawn = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">']
    for number, (value, text) in enumerate(marks):
        x = round(left + value * scale, 1)
        drawn.append(f'<g class="mark"><line x1="{x}" x2="{x}" y1="4" y2="{height}"/></g>')
        place, anchor = (x - 5, "end") if number == 0 else (x + 5, "start")
        drawn.append(f'<text class="tick" x="{place}" y="13" text-anchor="{anchor}">{escape(text)}</text>')
    y = top
    for name, bars in rows:
        middle = y + len(bars) * bar / 2 + 4
        drawn.append(f'<text class="tick" x="{left - 8}" y="{middle}" text-anchor="end">{escape(name)}</text>')
        for end, parts in bars:
            x = float(left)
            for style, what, length, number_text in parts:
                drawn.append(
                    f'<rect class="{style}" x="{x:.1f}" y="{y + 1}" width="{max(length * scale - 0.6, 0.3):.1f}" '
                    f'height="{bar - 2}"><title>{escape(f"{name}, {what}: {number_text}")}</title></rect>'
                )
                x += length * scale
            drawn.append(f'<text class="tick" x="{x + 6:.1f}" y="{y + bar - 3}">{escape(end)}</text>')
            y += bar
        y += gap
    keys = {(style, what): None for _, bars in rows for _, parts in bars for style, what, _, _ in parts}
    return _legend(list(keys)) + scrolling("".join([*drawn, "</svg>"]))


def stacked_bar_chart(
    label: str,
    names: Sequence[str],
    rows: Sequence[tuple[str, Sequence[float]]],
    show: Callable[[float], str],
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Draw one horizontal bar per row, a stack of parts.

    Args:
        label: chart description.
        names: part names, from the left; the first has colour c0.
        rows: (name, a value per part).
        show: function (value) -> text with a unit.
        marks: as in `bar_chart`.
    """
    bars = []
    for name, values in rows:
        whole = sum(values)
        parts = [
            (f"c{number % NUM_COLOURS}", part, value, f"{show(value)} ({value / whole:.1%})")
            for number, (part, value) in enumerate(zip(names, values, strict=True))
            if value > 0
        ]
        bars.append((name, [(show(whole), parts)]))
    return bar_chart(label, bars, marks)
