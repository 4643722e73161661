"""Renders a run's page section by section, and escapes all text from files."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

from triaxis.engine.config.plan import planned_steps
from triaxis.engine.errors import attempt_name
from triaxis.engine.storage.redaction import without_secrets
from triaxis.engine.telemetry.outlets.format import compact, duration, in_bytes, significant
from triaxis.engine.telemetry.record.events import ALERTS, Event
from triaxis.launch.pictures.document import html_document, tiles
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
    step = number(last, "step")
    planned = None if run.config is None else planned_steps(run.config)
    validation = [y for _, y in parts.series(run.steps, "val_loss") if math.isfinite(y)]
    tokens = sorted(y for _, y in parts.series(run.steps, "tokens_per_second") if math.isfinite(y))
    mfu = sorted(y for _, y in parts.series(run.steps, "mfu") if math.isfinite(y))
    seconds = parts.median_seconds(run)
    return [
        ("steps", "none" if math.isnan(step) else f"{step:,.0f}" + (f" of {planned:,}" if planned else "")),
        ("training loss, of the last step", parts.last(parts.series(run.steps, "loss"))),
        ("validation loss, the best", f"{min(validation):.4f}" if validation else "not measured"),
        ("tokens seen", _or_unknown(number(last, "consumed_tokens"), compact)),
        ("tokens per second, median", compact(tokens[len(tokens) // 2]) if tokens else "unknown"),
        ("MFU, median", f"{mfu[len(mfu) // 2]:.1%}" if mfu else "no peak known"),
        ("step time, median", _or_unknown(seconds, lambda value: f"{significant(value)} s")),
        ("time in steps, all attempts", duration(parts.trained_seconds(run))),
        ("attempts", str(len(run.attempts))),
        ("layout", str(parts.sizes_of(run) or "unknown")),
    ]


def _or_unknown(value: float, show: Any) -> str:
    return str(show(value)) if math.isfinite(value) else "unknown"


def _unreadable(run: RunRecord) -> str:
    if not run.num_unreadable:
        return ""
    lines = (
        "line of metrics.jsonl or events/ is" if run.num_unreadable == 1 else "lines of metrics.jsonl or events/ are"
    )
    return (
        f'<p class="warn">{run.num_unreadable:,} {lines} incomplete and left out: a killed run may leave one, and the next '
        "attempt cuts it off.</p>"
    )


def _checkpoints(run: RunRecord) -> str:
    if not run.checkpoints:
        return parts.MISSING.format("No checkpoint is on the disk.")
    rows = "".join(
        f'<tr><td class="when"><code>{escape(saved.name)}</code></td><td class="n">{saved.step:,}</td>'
        f'<td class="n">{"unknown" if saved.num_bytes is None else in_bytes(saved.num_bytes)}</td>'
        f'<td class="when">{escape(_written(saved.written_at))}</td><td class="text bad">{escape(saved.note)}</td></tr>'
        for saved in run.checkpoints
    )
    whole = sum(saved.num_bytes or 0 for saved in run.checkpoints)
    return (
        f'<p class="soft">{len(run.checkpoints):,} on the disk, {in_bytes(whole)} together.</p><div class="wide tall"><table><tr>'
        f'<th>folder</th><th class="n">step</th><th class="n">size</th><th>written</th><th></th></tr>{rows}</table></div>'
    )


def _attempts(run: RunRecord) -> str:
    if not run.attempts:
        return parts.MISSING.format("No attempt is recorded.")
    rows = ""
    for attempt in run.attempts:
        first, last = attempt.first_step, attempt.last_step
        steps = "none" if first is None or last is None else f"{first:,} to {last:,}"
        rows += (
            f'<tr><td>{attempt.number + 1}</td><td class="when">{"" if attempt.started is None else _when(attempt.started)}</td>'
            f'<td>{steps}</td><td class="{STATES.get(attempt.end, "warn")}">{escape(attempt.end)}</td></tr>'
        )
    return (
        '<div class="wide"><table><tr><th>attempt</th><th>started</th><th>steps</th><th>end</th></tr>'
        f"{rows}</table></div>"
    )


def _events(events: Sequence[Event]) -> str:
    if not events:
        return parts.MISSING.format("No event is recorded.")
    shown = list(events)
    if len(events) > MOST_EVENTS:
        late = len(events) - MOST_EVENTS
        shown = [event for place, event in enumerate(events) if place >= late or event.kind in ALERTS]
    rows = "".join(
        f'<tr><td class="when">{_when(event.unix_time_seconds)}</td><td class="n">{event.attempt + 1}</td>'
        f'<td class="n">{"" if event.step is None else f"{event.step:,}"}</td>'
        f'<td class="n">{"" if event.rank is None else event.rank}</td>'
        f'<td class="kind {_colour(event.kind)}">{escape(event.kind)}</td><td class="text">{_message(event)}</td></tr>'
        for event in shown
    )
    counts = ", ".join(f"{count:,} {kind}" for kind, count in Counter(event.kind for event in events).most_common())
    left_out = (
        f" Older events other than alerts are left out: {len(events) - len(shown):,}."
        if len(shown) < len(events)
        else ""
    )
    return (
        f'<p class="soft">{escape(counts)}.{left_out}</p><div class="wide tall"><table><tr><th>time</th><th class="n">attempt</th>'
        f'<th class="n">step</th><th class="n">rank</th><th>kind</th><th>message</th></tr>{rows}</table></div>'
    )


def _colour(kind: str) -> str:
    return {"ERROR": "bad", "WARN": "warn"}.get(ALERTS.get(kind, ""), "good" if kind == "finished" else "")


def _message(event: Event) -> str:
    """Render an event's message and details, without layout and peak memory."""
    details = {
        name.replace("_", " "): _value(value)
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


def _value(value: Any) -> str:
    if isinstance(value, float):
        return significant(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _layout(run: RunRecord) -> str:
    if not run.layout:
        return parts.MISSING.format("No attempt recorded its layout.")
    versions = run.layout.get("versions")
    rows = [*(versions.items() if isinstance(versions, Mapping) else []), *run.layout.items()]
    table = "".join(
        f'<tr><td>{escape(str(name).replace("_", " "))}</td><td class="text">{escape(_plain(value))}</td></tr>'
        for name, value in rows
        if name != "versions"
    )
    changed = [
        f"{attempt_name(later.number)}: {name} {_plain(earlier.layout.get(name))} -> {_plain(value)}"
        for earlier, later in zip(run.attempts, run.attempts[1:], strict=False)
        for name, value in later.layout.items()
        if earlier.layout and earlier.layout.get(name) != value
    ]
    notes = "".join(f'<p class="warn">{escape(change)}</p>' for change in changed)
    return f'<div class="wide"><table>{table}</table></div>{notes}'


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return " ".join(_plain(inner) for inner in value)
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "no", None: "none"}[value]
    return str(value)


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
