"""Shows a step's simulated times in the terminal, as a table and a critical path."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from rich.table import Table

from triaxis.engine.pipeline.actions import Action, Kind, Output
from triaxis.engine.pipeline.lowering import Transfer, feeding_transfer
from triaxis.engine.pipeline.simulate import SimulatedTimeline
from triaxis.engine.pipeline.validate import ScheduleFacts
from triaxis.engine.telemetry.outlets.format import significant
from triaxis.launch.pictures.tables import terminal_table

MOST_PIECES = 12
"""Largest number of lines for the critical path; of a longer path the middle is left out, since the pattern repeats."""

Place = tuple[int, int]
"""An action's rank, and its position in the rank's row."""


class Waits(NamedTuple):
    """A rank's idle time by cause, in the unit of the costs.

    Attributes:
        bubble: time in which the next input is not computed yet, or no action is left.
        messages: time in which the next input is computed but has not arrived.
    """

    bubble: float
    messages: float


class PathSegment(NamedTuple):
    """A segment of the critical path.

    Attributes:
        what: action or transfer that runs in this segment.
        rank: the action's rank, or the transfer's source.
        start, end: times in the unit of the costs; the next segment starts at `end`.
    """

    what: Action | Transfer
    rank: int
    start: float
    end: float


def rank_waits(timeline: SimulatedTimeline) -> list[Waits]:
    """Split each rank's idle time into bubble and waits for messages."""
    messages = [0.0] * len(timeline.intervals)
    for (rank, at), (source, its_place) in _feeding(timeline).items():
        row = timeline.intervals[rank]
        free = row[at - 1].end if at else 0.0
        messages[rank] += row[at].start - max(free, timeline.intervals[source][its_place].end)
    return [
        Waits(max(timeline.span - timeline.busy(rank) - waited, 0.0), waited) for rank, waited in enumerate(messages)
    ]


def critical_path(timeline: SimulatedTimeline) -> list[PathSegment]:
    """Find the chain of segments from time 0 to the last action's end, each of which delayed the next.

    Segments are in order of time. Those of zero length are left out.
    """
    rows, feeding = timeline.intervals, _feeding(timeline)
    rank = max(range(len(rows)), key=lambda each: rows[each][-1].end)
    at = len(rows[rank]) - 1
    path = []
    while at >= 0:
        action, start, end = rows[rank][at]
        path.append(PathSegment(action, rank, start, end))
        if start == (rows[rank][at - 1].end if at else 0.0):
            at -= 1
            continue
        # The rank was free before, so the action waited for a message.
        transfer = feeding_transfer(timeline.schedule, rank, action)
        assert transfer is not None
        rank, at = feeding[rank, at]
        path.append(PathSegment(transfer, rank, rows[rank][at].end, start))
    return [segment for segment in reversed(path) if segment.end > segment.start]


def _feeding(timeline: SimulatedTimeline) -> dict[Place, Place]:
    """Map each action that reads another stage's output to the action that computes it."""
    schedule = timeline.schedule
    made: dict[Output, Place] = {}
    needed: dict[Place, Output] = {}
    for rank, row in enumerate(schedule.actions):
        for at, action in enumerate(row):
            stage = schedule.placement.stage_of(rank, action.chunk)
            if (output := schedule.output_of(stage, action)) is not None:
                made[output] = rank, at
            if (source := schedule.input_of(stage, action)) is not None:
                needed[rank, at] = source
    return {place: made[source] for place, source in needed.items()}


def rank_table(timeline: SimulatedTimeline, waits_of: Sequence[Waits], facts: ScheduleFacts) -> Table:
    """Build a table with a row per rank.

    A row has shares of the step's time: actions, bubble, and waits for messages. Then comes the peak number of microbatches in
    flight. If any rank defers weight gradients, the peak number deferred follows.
    """
    held = facts.peak_held
    columns = ["rank", "busy", "bubble", "messages", "in flight", *(["held"] if any(held) else [])]
    table = terminal_table(*columns)
    for rank, waits in enumerate(waits_of):
        row = {
            "rank": str(rank),
            "busy": f"{timeline.busy(rank) / timeline.span:.1%}",
            "bubble": f"{waits.bubble / timeline.span:.1%}",
            "messages": f"{waits.messages / timeline.span:.1%}",
            "in flight": str(facts.peak_in_flight[rank]),
            "held": str(held[rank]),
        }
        table.add_row(*(row[column] for column in columns))
    return table


def path_summary(path: Sequence[PathSegment]) -> str:
    """Summarise a critical path by kind, as in `forward 31.0%, backward 62.1%, transfers 6.9%`."""
    seconds: dict[str, float] = {}
    for piece in path:
        name = piece.what.kind.words if isinstance(piece.what, Action) else "transfers"
        seconds[name] = seconds.get(name, 0.0) + piece.end - piece.start
    return ", ".join(f"{name} {time / path[-1].end:.1%}" for name, time in seconds.items())


def path_lines(path: Sequence[PathSegment]) -> list[str]:
    """Describe a critical path with a line per series of actions or transfers on one rank.

    With more than `MOST_PIECES` lines, the middle ones are replaced by their count.
    """
    lines = []
    groups = groupby(path, key=lambda piece: (piece.rank, isinstance(piece.what, Transfer)))
    for (rank, is_transfer), pieces in groups:
        members = list(pieces)
        start, end = significant(members[0].start), significant(members[-1].end)
        if is_transfer:
            words = "; ".join(str(piece.what) for piece in members)
        else:
            words = f"rank {rank}: {_shortened([piece.what for piece in members if isinstance(piece.what, Action)])}"
        lines.append(f"{start} to {end}  {words}")
    if len(lines) > MOST_PIECES:
        half = MOST_PIECES // 2
        lines[half:-half] = [f"... {len(lines) - 2 * half} more ..."]
    return lines


def _shortened(actions: Sequence[Action]) -> str:
    """Name the actions. More than six are shortened to the first two, the last, and a count of each kind."""
    if len(actions) <= 6:
        return " ".join(map(str, actions))
    counts = [f"{sum(each.kind is kind for each in actions)} {kind.value}" for kind in Kind]
    listed = ", ".join(count for count in counts if not count.startswith("0 "))
    return f"{actions[0]} {actions[1]} ... {actions[-1]} ({listed})"
