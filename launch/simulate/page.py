"""A simulated step as one HTML file: every action with its times, the critical path, what is kept on each rank (no torch here).

The data is one JSON object in the page, `triaxis.launch.simulate.script` draws it on a canvas, and the page loads nothing.
"""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from triaxis.engine.errors import ScheduleError, TriaxisError
from triaxis.engine.pipeline.actions import Action, Kind
from triaxis.engine.pipeline.lowering import Transfer
from triaxis.engine.pipeline.simulate import Interval
from triaxis.engine.pipeline.simulate_program import ProgramTimeline, TransferTime
from triaxis.engine.pipeline.text import ink, shade
from triaxis.engine.telemetry.outlets.format import significant
from triaxis.launch.pictures.document import tiles
from triaxis.launch.pictures.schedule_picture import colour_names
from triaxis.launch.pictures.style import CSS
from triaxis.launch.simulate.measured import Measured
from triaxis.launch.simulate.script import SCRIPT
from triaxis.launch.simulate.script import STYLE as OWN_STYLE
from triaxis.launch.simulate.words import path_summary

MOST_ACTIONS = 300_000
"""A page of more would be a file of tens of megabytes that a browser draws slowly."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""For the browser: it loads nothing, for any text in the page."""
DIGITS = 7
"""Of a time in the page."""


def write_page(timeline: ProgramTimeline, path: Path, title: str, unit: str, measured: Measured | None = None) -> None:
    """Write the page.

    Args:
        timeline: what was simulated.
        path: ends in .html.
        title: of the page.
        unit: of all times.
        measured: of the same schedule, in seconds as `timeline` then is.

    Raises:
        ScheduleError: more actions than a page can show.
        TriaxisError: `path` does not end in .html, or cannot be written.
    """
    num_actions = sum(map(len, timeline.intervals))
    if num_actions > MOST_ACTIONS:
        raise ScheduleError(
            f"{num_actions:,} actions do not fit a page that can be read (at most {MOST_ACTIONS:,}). The pattern repeats, so give "
            "fewer microbatches, or leave --out away."
        )
    if path.suffix.lower() not in (".html", ".htm"):
        raise TriaxisError(
            f"the page cannot be written to {path}: it is HTML, and other programs would misread the file by its name. Give a path "
            f"that ends in .html, such as {path.with_suffix('.html') if path.name else 'page.html'}."
        )
    try:
        path.write_text(render(timeline, title, unit, measured), encoding="utf-8")
    except OSError as error:
        raise TriaxisError(
            f"the page cannot be written to {path}: {error}. Give a path in a folder that can be written."
        ) from error


def render(timeline: ProgramTimeline, title: str, unit: str, measured: Measured | None) -> str:
    """Return the page's HTML; arguments as of `write_page`."""
    # In a script element only `<` could end the data early.
    data = json.dumps(page_data(timeline, unit, measured), separators=(",", ":")).replace("<", "\\u003c")
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{name}</span>' for colour, name in colour_names(timeline).items()
    )
    held = "; dashed: held, from the end of I to that of W" if any(timeline.peak_held) else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>{escape(title)}</title>
<style>{CSS}{OWN_STYLE}</style></head><body><main>
<h1>{escape(title)}</h1>
{tiles(_numbers(timeline, unit, measured))}
<section><h2>Time</h2>
<p class="soft">A row per pipeline rank{
        "; below it, thinner, what was measured" if measured else ""
    }. Point at an action for its
times, turn the wheel to zoom, drag to move, double-click for all.</p>
<p class="legend">{legend}<span><i class="path"></i>critical path</span><span><i class="idle"></i>idle</span></p>
<div id="time"><canvas></canvas></div>
<p>Critical path: {escape(path_summary(timeline))}.</p></section>
<section><h2>Kept on each rank</h2>
<p class="soft">Microbatch-chunks in flight, from the start of F to the end of B or I{
        held
    }. The axis is the one above.</p>
<div id="kept"><canvas></canvas></div></section>
<section><h2>Ranks</h2><div class="wide">{_table(timeline, measured)}</div></section>
<div id="tip" hidden></div>
<script type="application/json" id="data">{data}</script><script>{SCRIPT}</script>
</main></body></html>
"""


def page_data(timeline: ProgramTimeline, unit: str, measured: Measured | None) -> dict[str, Any]:
    """Return what the script draws.

    Times are rounded. An action is [start, end, kind, chunk, microbatch, is on the critical path, end of the one before it]
    and, where it waits for a transfer, [.., source, produced, began, ended, ready].
    """
    on_path = {(piece.rank, piece.what) for piece in timeline.critical_path}
    rows = []
    for rank, row in enumerate(timeline.intervals):
        free, actions = 0.0, []
        for each in row:
            critical = int((rank, each.action) in on_path)
            actions.append([*_action(each), critical, _short(free), *_fed(timeline.fed_by(rank, each.action))])
            free = each.end
        rows.append(actions)
    times = {each.transfer: each for each in timeline.transfers}
    jumps = [
        [piece.what.source, piece.what.destination, _short(times[piece.what].start), _short(times[piece.what].end)]
        for piece in timeline.critical_path
        if isinstance(piece.what, Transfer)
    ]
    ranks, kinds = range(len(rows)), [str(kind) for kind in Kind]
    chunks = range(timeline.schedule.placement.vpp)
    return {
        "span": _short(timeline.span),
        "unit": unit,
        "kinds": {kind: Kind(kind).words for kind in kinds},
        "colours": {
            f"{kind}{chunk}": [shade(action), ink(action)]
            for kind in kinds
            for chunk in chunks
            for action in [Action(Kind(kind), chunk, 0)]
        },
        "chunks": len(chunks),
        "rows": rows,
        "jumps": jumps,
        "flight": [[[_short(time), number] for time, number in timeline.in_flight(rank)] for rank in ranks],
        "held": [[[_short(time), number] for time, number in timeline.held(rank)] for rank in ranks],
        "measured": None if measured is None else [[_action(each) for each in row] for row in measured.rows],
    }


def _action(each: Interval) -> list[Any]:
    action = each.action
    return [_short(each.start), _short(each.end), str(action.kind), action.chunk, action.microbatch]


def _fed(fed: TransferTime | None) -> list[float]:
    if fed is None:
        return []
    return [fed.transfer.source, *map(_short, (fed.produced, fed.start, fed.end, fed.ready))]


def _short(time: float) -> float:
    return float(f"{time:.{DIGITS}g}")


def _numbers(timeline: ProgramTimeline, unit: str, measured: Measured | None) -> list[tuple[str, str]]:
    placement = timeline.schedule.placement
    numbers = [
        ("span", significant(timeline.span)),
        ("bubble of the rank that waits most", f"{timeline.largest_bubble_fraction:.2%}"),
        ("most in flight", str(max(timeline.peak_in_flight))),
        ("schedule", timeline.schedule.name),
        (
            "pipeline",
            f"pp {placement.pp} x vpp {placement.vpp}, {timeline.schedule.num_microbatches} microbatches",
        ),
        ("unit of time", unit),
    ]
    if measured is not None:
        numbers.insert(1, (f"measured, step {measured.step}", significant(measured.span)))
    return numbers


def _table(timeline: ProgramTimeline, measured: Measured | None) -> str:
    columns = ["rank", "busy", "bubble", "waiting for messages", "most in flight", "most held"]
    columns += ["measured idle"] if measured is not None else []
    rows: list[Sequence[str]] = []
    for rank, waits in enumerate(timeline.waits):
        shares = [timeline.busy(rank), waits.bubble, waits.messages]
        row = [str(rank), *(f"{share / timeline.span:.2%}" for share in shares)]
        row += [str(timeline.peak_in_flight[rank]), str(timeline.peak_held[rank])]
        rows.append([*row, f"{measured.bubble_fraction(rank):.2%}"] if measured is not None else row)
    head = "".join(f'<th class="n">{name}</th>' for name in columns)
    cells = ("".join(f'<td class="n">{value}</td>' for value in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><tr>{head}</tr>{body}</table>"
