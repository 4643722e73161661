"""Shows a step's times in the terminal, as a table and a critical path."""

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from triaxis.engine.pipeline.actions import Action, Kind
from triaxis.engine.pipeline.lowering import Transfer
from triaxis.engine.pipeline.validate import ScheduleFacts
from triaxis.engine.telemetry.outlets.format import significant
from triaxis.launch.pictures.simulate_program import ProgramTimeline

MOST_PIECES = 12
"""Largest number of lines for the critical path; of a longer path the middle is left out, since the pattern repeats."""


def rank_table(timeline: ProgramTimeline, facts: ScheduleFacts) -> Table:
    """Build a table with a row per rank.

    A row has shares of the step's time: actions, bubble, and waits for messages. Then comes the peak number of microbatches in
    flight. If any rank defers weight gradients, the peak number deferred follows.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    held = facts.peak_held
    columns = ["rank", "busy", "bubble", "messages", "in flight", *(["held"] if any(held) else [])]
    for column in columns:
        table.add_column(column, justify="right")
    for rank, waits in enumerate(timeline.waits):
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


def path_summary(timeline: ProgramTimeline) -> str:
    """Summarise the critical path by kind, as in `forward 31.0%, backward 62.1%, transfers 6.9%`."""
    seconds: dict[str, float] = {}
    for piece in timeline.critical_path:
        name = piece.what.kind.words if isinstance(piece.what, Action) else "transfers"
        seconds[name] = seconds.get(name, 0.0) + piece.end - piece.start
    return ", ".join(f"{name} {time / timeline.span:.1%}" for name, time in seconds.items())


def path_lines(timeline: ProgramTimeline) -> list[str]:
    """Describe the critical path with a line per series of actions or transfers on one rank.

    With more than `MOST_PIECES` lines, the middle ones are replaced by their count.
    """
    lines = []
    groups = groupby(timeline.critical_path, key=lambda piece: (piece.rank, isinstance(piece.what, Transfer)))
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
