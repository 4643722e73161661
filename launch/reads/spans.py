"""Groups a run's steps by the attempt that ran them last and by skipped samples."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from triaxis.engine.config.names.earlier import translated
from triaxis.engine.config.schema.dotted import with_fields
from triaxis.engine.config.tree import Config
from triaxis.engine.data.skipped import SkippedRanges
from triaxis.engine.errors import DataError
from triaxis.engine.telemetry.record.events import Event
from triaxis.launch.reads.repeats import ReadSpan
from triaxis.launch.report.record import RunRecord, read_run


def read_trained(path: Path) -> tuple[RunRecord, Config]:
    """Read a run that was trained on documents, and its configuration.

    Raises:
        DataError: the run's config cannot be read, or the run was trained on random tokens.
    """
    run = read_run(path)
    if run.config is None:
        raise DataError(f"{path}: {run.config_problem}. What a run reads follows from it.")
    if run.config.data.synthetic:
        raise DataError(f"{path} was trained on random tokens (data.synthetic), which are of no document.")
    return run, run.config


def spans_of(run: RunRecord, config: Config) -> Iterator[ReadSpan]:
    """Yield spans that cover a run's steps in order.

    All steps in a span have consecutive numbers and the same skipped ranges. The same attempt ran all of them last.

    `config` is the run's configuration. In an attempt's spans, the fields that the attempt recorded replace those in `config`.
    """
    begun = {event.attempt: event for event in run.events if event.kind == "begun"}
    rollbacks = [event for event in run.events if event.kind == "rolled_back"]

    def origin(record: Mapping[str, Any]) -> tuple[int, SkippedRanges]:
        attempt = record.get("attempt", 0)
        return attempt, _skipped_at(record["step"], attempt, begun, rollbacks)

    for (attempt, skipped), records in groupby(run.steps, key=origin):
        steps = [record["step"] for record in records]
        reads = begun[attempt].details.get("reads") if attempt in begun else None
        made = with_fields(config, translated(reads)) if isinstance(reads, dict) else config
        # A span ends where records are missing, so `reads_of_run` reports a jump.
        for _, run_of_steps in groupby(enumerate(steps), key=lambda pair: pair[1] - pair[0]):
            group = [step for _, step in run_of_steps]
            yield ReadSpan(group[0] - 1, group[-1], attempt, made, skipped)


def span_of_step(run: RunRecord, config: Config, step: int) -> ReadSpan:
    """Return the span that contains a step, counted from 1.

    If no attempt has run the step yet, the span has only this step. Its attempt and skipped ranges are the run's last.
    """
    spans = list(spans_of(run, config))
    found = next((span for span in spans if span.first_step < step <= span.end_step), None)
    if found is not None:
        return found
    skipped = [event.details.get("skipped") for event in run.events if event.kind in ("begun", "rolled_back")]
    attempt = run.attempts[-1].number if run.attempts else 0
    return ReadSpan(step - 1, step, attempt, config, ranges_of(skipped[-1] if skipped else None))


def _skipped_at(step: int, attempt: int, begun: Mapping[int, Event], rollbacks: Sequence[Event]) -> SkippedRanges:
    """Find the sample ranges that were skipped when an attempt ran a step.

    The ranges come from the attempt's last rollback to before `step`. Without one, they come from the attempt's beginning.
    """
    began_with = begun[attempt].details.get("skipped") if attempt in begun else None
    # Attempts made by older versions do not record their first ranges; the last rollback in an earlier attempt has them.
    before = [event.details.get("skipped") for event in rollbacks if event.attempt < attempt]
    known = [began_with] if began_with is not None else before[-1:]
    own = [event for event in rollbacks if event.attempt == attempt and int(event.details.get("to_step", 0)) < step]
    known += [event.details.get("skipped") for event in own]
    return ranges_of(known[-1] if known else None)


def ranges_of(recorded: Any) -> SkippedRanges:
    """Parse an event's skipped ranges, a list of (first, stop) pairs. None gives no ranges.

    Raises:
        DataError: the event records something else.
    """
    try:
        return SkippedRanges.of((int(first), int(stop)) for first, stop in recorded or [])
    except (TypeError, ValueError) as error:
        raise DataError(f"an event of the run records no ranges of samples: {recorded!r}.") from error
