"""Draws a pipeline schedule with a row per pipeline rank and a bar per action."""

import math
from collections.abc import Callable
from html import escape
from pathlib import Path

from triaxis.engine.errors import ScheduleError
from triaxis.engine.pipeline.actions import Action, Kind, Schedule
from triaxis.engine.pipeline.simulate import Costs, SimulatedTimeline, simulate
from triaxis.engine.pipeline.text import ink, shade
from triaxis.launch.pictures.charts import WIDTH, scrolling, tick, ticks
from triaxis.launch.pictures.drawing import element, text, write_picture

ROW, LEFT, RIGHT, TOP = 30, 72, 24, 48
"""Row height, and margins for a picture in a file, in pixels."""
UNIT = 28
"""Width of one chunk's forward in pixels, unless LEAST_WIDTH or MOST_WIDTH decides the scale."""
LEAST_WIDTH, MOST_WIDTH = 640, 7200
MOST_ACTIONS = 100_000
"""Largest number of actions in a picture; with more, the file would have tens of megabytes and show only colours."""
KEY = 200
"""Width of a legend entry, in pixels."""


def in_forwards(schedule: Schedule) -> SimulatedTimeline:
    """Time a schedule in forwards of a chunk: a backward takes two, for its two matrix products, and a transfer none."""
    return simulate(schedule, Costs.uniform(schedule.placement.num_stages))


def draw_schedule(timeline: SimulatedTimeline, path: Path) -> None:
    """Write the schedule to an SVG file.

    Raises:
        ScheduleError: the schedule has more than MOST_ACTIONS actions.
        TriaxisError: `path` does not end in .svg, or cannot be written.
    """
    num_ranks, num_actions = len(timeline.intervals), sum(map(len, timeline.intervals))
    if num_actions > MOST_ACTIONS:
        raise ScheduleError(
            f"{num_actions:,} actions do not fit a picture that can be read (at most {MOST_ACTIONS:,}). The pattern repeats, so "
            "give fewer microbatches, or take --form text."
        )
    width = min(max(timeline.span * UNIT, LEAST_WIDTH), MOST_WIDTH)
    placement = timeline.schedule.placement
    title = (
        f"{timeline.schedule.name}, pp {placement.pp}, vpp {placement.vpp}, {timeline.schedule.num_microbatches} microbatches: "
        f"idle at most {timeline.largest_bubble_fraction:.1%}"
    )
    parts = [element("style", ".idle { fill: #eceef1; }"), text(title, LEFT, TOP / 2, 15, weight="bold")]
    for rank in range(num_ranks):
        parts.append(text(f"rank {rank}", LEFT - 10, TOP + rank * ROW + (ROW - 4) / 2, 12, anchor="end"))
    parts += _rows(timeline, left=LEFT, top=TOP, width=width, row=ROW)
    axis = TOP + num_ranks * ROW + 6
    parts += _time_axis(timeline.span, width, axis)
    columns = max(1, int((width + RIGHT) // KEY))
    keys = colour_names(timeline)
    for number, (colour, name) in enumerate(keys.items()):
        x, y = LEFT + number % columns * KEY, axis + 54 + number // columns * 22
        parts.append(element("rect", x=x, y=y, width=12, height=12, rx=3, fill=colour))
        parts.append(text(name, x + 18, y + 6, 12))
    write_picture(path, LEFT + width + RIGHT, axis + 64 + math.ceil(len(keys) / columns) * 22, title, parts)


def schedule_chart(timeline: SimulatedTimeline, show: Callable[[float], str] | None = None) -> str:
    """Draw the schedule as HTML, as wide as the page.

    Args:
        timeline: timed schedule.
        show: function (time) -> text with a unit, shown under the pointer; None leaves the times out.
    """
    row, left, right = 26, 62, 14
    num_ranks = len(timeline.intervals)
    parts = [
        element("text", f"pp {rank}", **{"class": "tick"}, x=left - 8, y=rank * row + 20, text_anchor="end")
        for rank in range(num_ranks)
    ]
    parts += _rows(timeline, left=left, top=4, width=WIDTH - left - right, row=row, show=show)
    frame = {"viewBox": f"0 0 {WIDTH} {num_ranks * row + 8}", "aria_label": "the schedule, a row per pipeline rank"}
    keys = "".join(
        f'<span><i style="background:{colour}"></i>{name}</span>' for colour, name in colour_names(timeline).items()
    )
    legend = f'<p class="legend">{keys}<span><i class="idle"></i>idle</span></p>'
    return legend + scrolling(element("svg", "".join(parts), role="img", **frame))


def _time_axis(span: float, width: float, y: float) -> list[str]:
    parts = [element("line", x1=LEFT, x2=LEFT + width, y1=y, y2=y, stroke="#b9bec8")]
    for value in ticks(0.0, span, most=max(4, int(width / 90))):
        x = LEFT + value / span * width
        parts.append(element("line", x1=x, x2=x, y1=y, y2=y + 5, stroke="#b9bec8"))
        parts.append(text(tick(value), x, y + 14, 11, anchor="middle"))
    return [*parts, text("time in forwards of one chunk", LEFT, y + 34, 12)]


def _rows(
    timeline: SimulatedTimeline,
    *,
    left: float,
    top: float,
    width: float,
    row: float,
    show: Callable[[float], str] | None = None,
) -> list[str]:
    """Draw the bars for all ranks; a bar with enough room shows its microbatch number.

    Args:
        timeline: timed schedule.
        left, top: corner of the first row, in pixels.
        width: width of the whole time span, in pixels.
        row: row height including the gap below, in pixels.
        show: function (time) -> text with a unit, shown under the pointer; None leaves the times out.
    """
    scale, parts = width / timeline.span, []
    for rank, intervals in enumerate(timeline.intervals):
        y = top + rank * row
        parts.append(element("rect", **{"class": "idle"}, x=left, y=y, width=width, height=row - 4))
        for interval in intervals:
            action = interval.action
            x, length = left + interval.start * scale, (interval.end - interval.start) * scale
            words = _name(timeline, action, f" of microbatch {action.microbatch}")
            if show is not None:
                words += f": {show(interval.end - interval.start)}, from {show(interval.start)} to {show(interval.end)}"
            title = element("title", escape(words))
            bar = {"x": x, "y": y, "width": max(length - min(0.6, length / 5), 0.2), "height": row - 4}
            parts.append(element("rect", title, fill=shade(action), **bar))
            if length >= 6.5 * len(str(action.microbatch)) + 2:
                middle = x + length / 2, y + row / 2 - 2
                parts.append(text(str(action.microbatch), *middle, 11, fill=ink(action), anchor="middle"))
    return parts


def _name(timeline: SimulatedTimeline, action: Action, of: str = "") -> str:
    """Name an action by its kind, the words in `of`, and its chunk if ranks have several."""
    chunk = f", chunk {action.chunk}" if timeline.schedule.placement.vpp > 1 else ""
    return f"{action.kind.words}{of}{chunk}"


def colour_names(timeline: SimulatedTimeline) -> dict[str, str]:
    """Map each colour in the picture to its meaning. With many chunks, some chunks share a colour."""
    used = {Action(each.action.kind, each.action.chunk, 0) for row in timeline.intervals for each in row}
    actions: dict[str, list[Action]] = {}
    for action in sorted(used, key=lambda each: (list(Kind).index(each.kind), each.chunk)):
        actions.setdefault(shade(action), []).append(action)
    return {
        colour: _name(timeline, own[0])
        if len(own) == 1
        else f"{own[0].kind.words}, chunks {own[0].chunk}, {own[1].chunk}{', ..' if len(own) > 2 else ''}"
        for colour, own in actions.items()
    }
