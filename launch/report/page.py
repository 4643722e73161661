"""Renders a run's page section by section, and escapes all text from files."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from statistics import median_high
from typing import Any

from triaxis.engine.config.quantities.plan import planned_steps
from triaxis.engine.errors import attempt_name, counted
from triaxis.engine.storage.redaction import without_secrets
from triaxis.engine.telemetry.outlets.format import compact, duration, in_bytes, significant
from triaxis.engine.telemetry.record.events import ALERTS, Event
from triaxis.launch.pictures.document import html_document, html_table, tiles
from triaxis.launch.report import experts, parts
from triaxis.launch.report.predicted import predicted_beside_measured
from triaxis.launch.report.record import RunRecord, number
from triaxis.models.predict.step_time.cluster import Cluster

MOST_EVENTS = 400
"""Largest number of events that are all shown; of more, all alerts and the last MOST_EVENTS are shown."""

MOST_CHARACTERS = 50_000
"""Largest number of characters shown for one detail of an event, such as a hang report."""

STATES = {"finished": "good", "failed": "bad", "hung": "bad"}
"""CSS class for each end of a run or attempt; every other end has the class `warn`."""


def render(run: RunRecord, now: float, cluster: Cluster | None = None) -> str:
    """Render a run's page, with secrets redacted.

    Args:
        run: result of `read_run`.
        now: Unix time at which the page is made.
        cluster: cluster that the run used, for the predicted step; None: the recorded devices with their usual links.

    Raises:
        ConfigError: `cluster` has fewer devices than the run has ranks, or no rate for the run's dtype.
    """
    name = run.path.resolve().name
    sections = {
        "loss": ("Loss, nats per token", parts.loss(run) + parts.small_charts(run)),
        "throughput": ("Throughput", parts.throughput(run)),
        "time": ("Where the time goes", parts.times(run)),
        "predicted": ("Predicted beside measured", predicted_beside_measured(run, cluster)),
        "experts": ("Load of experts", experts.expert_load(run)),
        "memory": ("Memory per rank", parts.memory(run)),
        "schedule": ("Pipeline schedule and bubble", parts.schedule(run)),
        "checkpoints": ("Checkpoints", _checkpoints(run)),
        "attempts": ("Attempts", _attempts(run)),
        "events": ("Events", _events(run.events)),
        "versions": ("Layout and versions", _layout(run)),
        "config": ("Configuration", _config(run)),
    }
    sections = {key: section for key, section in sections.items() if section[1] or key != "experts"}
    state = f'<span class="state {STATES.get(run.state, "warn")}">{escape(run.state)}</span>'
    footer = f"Made by triaxis report from {run.path} on {_when(now)}."
    before = tiles(_numbers(run)) + _unreadable(run)
    page = html_document(f"{name}: Triaxis run", name, before, sections, footer, state=state)
    return without_secrets(page)


def _numbers(run: RunRecord) -> list[tuple[str, str]]:
    last = run.steps[-1] if run.steps else {}
    step, seen = number(last, "step"), number(last, "consumed_tokens")
    planned = None if run.config is None else planned_steps(run.config)
    validation, tokens = parts.finite(run, "val_loss"), parts.finite(run, "tokens_per_second")
    mfu, seconds = parts.finite(run, "mfu"), parts.finite(run, "step_time_seconds")
    return [
        ("steps", "none" if math.isnan(step) else f"{step:,.0f}" + (f" of {planned:,}" if planned else "")),
        ("training loss, of the last step", parts.last(parts.series(run.steps, "loss"))),
        ("validation loss, the best", f"{min(validation):.4f}" if validation else "not measured"),
        ("tokens seen", compact(seen) if math.isfinite(seen) else "unknown"),
        ("tokens per second, median", compact(median_high(tokens)) if tokens else "unknown"),
        ("MFU, median", f"{median_high(mfu):.1%}" if mfu else "no peak known"),
        ("step time, median", f"{significant(median_high(seconds))} s" if seconds else "unknown"),
        ("time in steps, all attempts", duration(parts.trained_seconds(run))),
        ("attempts", str(len(run.attempts))),
        ("layout", str(parts.sizes_of(run) or "unknown")),
    ]


def _unreadable(run: RunRecord) -> str:
    if not run.num_unreadable:
        return ""
    lines, verb = counted(run.num_unreadable, "line"), "is" if run.num_unreadable == 1 else "are"
    return (
        f'<p class="warn">{lines} of metrics.jsonl or events/ {verb} incomplete and left out: a killed run may leave one, and '
        "the next attempt cuts it off.</p>"
    )


def _checkpoints(run: RunRecord) -> str:
    if not run.checkpoints:
        return parts.MISSING.format("No checkpoint is on the disk.")
    columns = (("folder", "when"), ("step", "n"), ("size", "n"), ("written", "when"), ("", "text bad"))
    rows = [
        (
            f"<code>{escape(saved.name)}</code>",
            f"{saved.step:,}",
            "unknown" if saved.num_bytes is None else in_bytes(saved.num_bytes),
            escape(_written(saved.written_at)),
            escape(saved.note),
        )
        for saved in run.checkpoints
    ]
    whole = in_bytes(sum(saved.num_bytes or 0 for saved in run.checkpoints))
    said = f'<p class="soft">{len(run.checkpoints):,} on the disk, {whole} together.</p>'
    return said + html_table(columns, rows, tall=True)


def _attempts(run: RunRecord) -> str:
    if not run.attempts:
        return parts.MISSING.format("No attempt is recorded.")
    rows = []
    for attempt in run.attempts:
        first, last = attempt.first_step, attempt.last_step
        steps = "none" if first is None or last is None else f"{first:,} to {last:,}"
        started = "" if attempt.started is None else _when(attempt.started)
        rows.append((f"{attempt.number + 1}", started, steps, _coloured(STATES.get(attempt.end, "warn"), attempt.end)))
    return html_table((("attempt", ""), ("started", "when"), ("steps", ""), ("end", "")), rows)


def _coloured(style: str, text: str) -> str:
    return f'<span class="{style}">{escape(text)}</span>'


def _events(events: Sequence[Event]) -> str:
    if not events:
        return parts.MISSING.format("No event is recorded.")
    shown = list(events)
    if len(events) > MOST_EVENTS:
        late = len(events) - MOST_EVENTS
        shown = [event for place, event in enumerate(events) if place >= late or event.kind in ALERTS]
    columns = (("time", "when"), ("attempt", "n"), ("step", "n"), ("rank", "n"), ("kind", "kind"), ("message", "text"))
    rows = [
        (
            _when(event.unix_time_seconds),
            f"{event.attempt + 1}",
            "" if event.step is None else f"{event.step:,}",
            "" if event.rank is None else f"{event.rank}",
            _coloured(_colour(event.kind), event.kind),
            _message(event),
        )
        for event in shown
    ]
    counts = ", ".join(f"{count:,} {kind}" for kind, count in Counter(event.kind for event in events).most_common())
    left_out = (
        f" Older events other than alerts are left out: {len(events) - len(shown):,}."
        if len(shown) < len(events)
        else ""
    )
    return f'<p class="soft">{escape(counts)}.{left_out}</p>' + html_table(columns, rows, tall=True)


def _colour(kind: str) -> str:
    return {"ERROR": "bad", "WARN": "warn"}.get(ALERTS.get(kind, ""), "good" if kind == "finished" else "")


def _message(event: Event) -> str:
    """Render an event's message and details, without layout and peak memory."""
    details = {
        name.replace("_", " "): _plain(value)
        for name, value in event.details.items()
        if value not in (None, "", [], {}) and name not in ("layout", "peak_memory_bytes")
    }
    short = "; ".join(f"{name} {text}" for name, text in details.items() if not _is_long(text))
    folded = "".join(
        f"<details><summary>{escape(name)}</summary><pre>{escape(text[:MOST_CHARACTERS])}</pre></details>"
        for name, text in details.items()
        if _is_long(text)
    )
    separator = "<br>" if event.message and short else ""
    return f'{escape(event.message)}{separator}<span class="soft">{escape(short)}</span>{folded}'


def _is_long(text: str) -> bool:
    return len(text) > 300 or "\n" in text


def _layout(run: RunRecord) -> str:
    if not run.layout:
        return parts.MISSING.format("No attempt recorded its layout.")
    versions = run.layout.get("versions")
    facts = [*(versions.items() if isinstance(versions, Mapping) else []), *run.layout.items()]
    rows = [(escape(str(name).replace("_", " ")), escape(_plain(value))) for name, value in facts if name != "versions"]
    changed = [
        f"{attempt_name(later.number)}: {name} {_plain(earlier.layout.get(name))} -> {_plain(value)}"
        for earlier, later in zip(run.attempts, run.attempts[1:], strict=False)
        for name, value in later.layout.items()
        if earlier.layout and earlier.layout.get(name) != value
    ]
    notes = "".join(f'<p class="warn">{escape(change)}</p>' for change in changed)
    return html_table((("", ""), ("", "text")), rows) + notes


def _plain(value: Any) -> str:
    """Format a value of a record for people."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return " ".join(_plain(inner) for inner in value)
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return significant(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _config(run: RunRecord) -> str:
    problem = f'<p class="warn">{escape(run.config_problem)}</p>' if run.config_problem else ""
    text = f'<pre class="tall">{escape(run.config_text)}</pre>' if run.config_text else ""
    return problem + text


def _written(iso_time: str) -> str:
    """Format the time when a checkpoint was written like the page's other times.

    Text that is not an ISO time with a time zone is shown as it is.
    """
    try:
        written = datetime.fromisoformat(iso_time)
    except ValueError:
        return iso_time
    return iso_time if written.tzinfo is None else _when(written.timestamp())


def _when(unix_time_seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_time_seconds))
    except (OverflowError, OSError, ValueError):
        return "unknown"
