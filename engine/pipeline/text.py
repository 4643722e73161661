"""Writes schedules as text, and draws them for the terminal.

    schedule=1f1b pp=2 vpp=1 microbatches=3 forward_only=no
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 0F0 0B0 0F1 0B1 0F2 0B2

`0B1` is chunk 0, backward, microbatch 1. If chunks are placed in a V, the first line ends with `placement=v`. A lowered program has
its group calls in brackets. `>F1@2` sends microbatch 1's activation to stage 2. `<B0@1` receives microbatch 0's gradient for stage
1's output.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from rich.style import Style
from rich.text import Text

from triaxis.engine.config.values.schedule_file import parse_schedule
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Action, Kind, Schedule
from triaxis.engine.pipeline.lowering import Instruction, Post, Program
from triaxis.engine.pipeline.simulate import Interval, SimulatedTimeline

_FILL = {Kind.F: " ", Kind.B: "=", Kind.I: "-", Kind.W: "~"}
_COLOURS = {
    Kind.F: ("#a6cee3", "#5fa2ce", "#3f78ab", "#2b5580"),
    Kind.B: ("#b2df8a", "#7fbf5a", "#55973b", "#3b6d2a"),
    Kind.I: ("#fdd08a", "#fdb04a", "#e08a1e", "#a8640f"),
    Kind.W: ("#dcc7ea", "#b795d0", "#8f63b0", "#67428a"),
}
_IDLE = "."


def to_text(schedule: Schedule) -> str:
    """Write the text form; `from_text` reads it back."""
    return _text(schedule, [[str(action) for action in row] for row in schedule.actions])


def program_to_text(program: Program) -> str:
    """Write the text form in the module's docstring: a header, then each rank's actions and group calls."""
    return _text(program.schedule, [instruction_tokens(rank, row) for rank, row in enumerate(program.instructions)])


def _text(schedule: Schedule, rows: Sequence[Sequence[str]]) -> str:
    header = (
        f"schedule={schedule.name} pp={schedule.placement.pp} vpp={schedule.placement.vpp} "
        f"microbatches={schedule.num_microbatches} forward_only={'yes' if schedule.forward_only else 'no'}"
        f"{' placement=v' if schedule.placement.is_v else ''}"
    )
    lines = [f"rank {rank}: {' '.join(row)}" for rank, row in enumerate(rows)]
    return "\n".join([header, *lines]) + "\n"


def from_text(text: str) -> Schedule:
    """Read a schedule that `to_text` wrote.

    Empty lines and lines that begin with `#` are skipped. `check` decides whether the schedule makes sense.

    Raises:
        ScheduleError: a line cannot be read.
    """
    return schedules.from_rows(parse_schedule(text))


def instruction_tokens(rank: int, instructions: Sequence[Instruction]) -> list[str]:
    """Write a rank's instructions: `0F1` (chunk 0, forward, microbatch 1), `[>F1@2]` (send its output to stage 2)."""
    return [post_token(rank, each) if isinstance(each, Post) else str(each) for each in instructions]


def post_token(rank: int, post: Post) -> str:
    """Write a group call from its rank's point of view, such as `[>F1@2 <F2@1]`."""
    transfers = (
        f"{'>' if t.source == rank else '<'}{'F' if t.direction == 'forward' else 'B'}{t.microbatch}@{t.stage}"
        for t in post.transfers
    )
    return f"[{' '.join(transfers)}]"


def pointed_rows(rows: Sequence[Sequence[str]], marks: Mapping[tuple[int, int], str], context: int = 6) -> str:
    """Format rows of tokens with an arrow and a note under each marked token.

    Long rows are cut to `context` tokens around the marks. If there are more than 16 rows, only marked ones are shown.

    Args:
        marks: notes by (rank, position in its row); a position past the end points after the row.
    """
    lines = []
    middle = min(position for _, position in marks)
    for rank, row in enumerate(rows):
        own = sorted(position for marked_rank, position in marks if marked_rank == rank)
        if not own and len(rows) > 16:
            continue
        first = max(min(own, default=middle) - context, 0)
        last = max(own, default=middle) + context + 1
        shown = [*row[first:last], "(end)"] if last > len(row) else [*row[first:last], "..."]
        label = f"  rank {rank}: {'... ' if first else ''}"
        lines.append(label + " ".join(shown))
        for position in own:
            before = len(label) + sum(len(token) + 1 for token in shown[: position - first])
            lines.append(" " * before + "^" * len(shown[position - first]) + " " + marks[rank, position])
    return "\n".join(lines)


def render_timeline(timeline: SimulatedTimeline, width: int | None = None) -> Text:
    """Draw a timeline with a row per rank, time to the right, and idle time dotted.

    Below it are a legend, the span, and the largest idle share of a rank.

    Args:
        width: number of screen columns; a longer picture continues below. None: one long picture.

    Returns:
        Text that is readable without its colours too. A cell is `F3`, or `0F3` if ranks have several chunks.
    """
    rows = timeline.intervals
    labels = [f"rank {rank} " for rank in range(len(rows))]
    label_width = max(len(label) for label in labels)
    cell = max(len(_label(timeline, interval)) for row in rows for interval in row) + 1
    shortest = min(interval.end - interval.start for row in rows for interval in row if interval.end > interval.start)
    # Fractions, so that equal times fall on equal columns. The shortest action has room for its label and a gap.
    columns_per_unit = Fraction(cell) / Fraction(shortest)
    bands = [_band(timeline, row, columns_per_unit) for row in rows]
    num_columns = len(bands[0])
    # Cut where cells may begin, so that no label is cut; two columns are the frame's.
    step = num_columns if width is None else max((width - label_width - 2) // cell, 1) * cell
    picture = Text(no_wrap=True)
    for first in range(0, num_columns, step):
        for label, band in zip(labels, bands, strict=True):
            picture.append(label.rjust(label_width) + "|", style="dim")
            picture.append_text(band[first : first + step])
            picture.append("|\n", style="dim")
        if first + step < num_columns:
            picture.append("\n")
    kinds = {interval.action.kind for row in rows for interval in row}
    picture.append(_summary(timeline, kinds), style="dim")
    return picture


def shade(action: Action) -> str:
    """Choose an action's colour in pictures, as #rrggbb. The kind selects the hue; chunk i has shade i mod 4."""
    shades = _COLOURS[action.kind]
    return shades[action.chunk % len(shades)]


def ink(action: Action) -> str:
    """Choose the text colour for an action that is drawn on its `shade`."""
    return "white" if action.chunk % len(_COLOURS[action.kind]) >= 2 else "black"


def _label(timeline: SimulatedTimeline, interval: Interval) -> str:
    text = str(interval.action)
    return text if timeline.schedule.placement.vpp > 1 else text.removeprefix("0")


def _band(timeline: SimulatedTimeline, row: Sequence[Interval], columns_per_unit: Fraction) -> Text:
    """Draw one rank's line, from time 0 to the end of the whole timeline."""

    def column(time: float) -> int:
        return round(Fraction(time) * columns_per_unit)

    band = Text()
    for interval in row:
        start, end = column(interval.start), column(interval.end)
        band.append(_IDLE * (start - len(band)), style="dim")
        kind = interval.action.kind
        style = Style(color=ink(interval.action), bgcolor=shade(interval.action))
        label = _label(timeline, interval)
        band.append(label.ljust(end - start - 1, _FILL[kind])[: max(end - start - 1, 0)] + " ", style=style)
    band.append(_IDLE * (column(timeline.span) - len(band)), style="dim")
    return band


def _summary(timeline: SimulatedTimeline, kinds: set[Kind]) -> str:
    legend = [f"{kind.value}{_FILL[kind].strip()} {kind.words}" for kind in Kind if kind in kinds]
    worst = timeline.largest_bubble_fraction
    return f"{'   '.join([*legend, f'{_IDLE} idle'])}\nspan {timeline.span:g}, idle at most {worst:.1%} of it on a rank"
