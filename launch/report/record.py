"""Reads the files in a run directory, of which some may be damaged or missing.

    config.yaml      ->  config, config_text          metrics.jsonl  ->  steps, replaced
    events/          ->  events, attempts             checkpoints/   ->  checkpoints
    finished         ->  results

Nothing is written and no lock is taken, so a page can be made during the run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triaxis.engine.checkpoint.directory import CheckpointDirectory, folder_of_run
from triaxis.engine.checkpoint.format.manifest import parse_manifest
from triaxis.engine.config.load import load_config
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import CheckpointError, TriaxisError
from triaxis.engine.run.entries import events_files
from triaxis.engine.storage.state_files import explaining_storage, read_object, read_regular, reason
from triaxis.engine.telemetry.record.events import Event, read_events
from triaxis.engine.telemetry.record.jsonl import read_records
from triaxis.launch.report.rows import Row, Rows


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A checkpoint on disk.

    Attributes:
        name: folder name.
        num_bytes: size of the tensor files, from the manifest; None if the manifest cannot be read.
        written_at: time in the manifest, as ISO text; "" if the manifest cannot be read.
        note: reason why the manifest cannot be read, or "".
    """

    name: str
    step: int
    num_bytes: int | None
    written_at: str
    note: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the run.

    Attributes:
        number: attempt number, from 0.
        started: Unix time of the attempt's first event; None if it has no event.
        first_step, last_step: first and last step that the attempt recorded; None if there are none.
        end: description of the attempt's end, in words.
        layout: layout and versions that the attempt recorded when it started; empty if it recorded none.
    """

    number: int
    started: float | None
    first_step: int | None
    last_step: int | None
    end: str
    layout: Mapping[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """Everything that a run's files record.

    Attributes:
        config: configuration; None if config.yaml is missing, unreadable or not valid in this version of Triaxis.
        config_problem: reason why there is no `config`, or "".
        steps: records from metrics.jsonl, one per step, ascending; for a repeated step, the last record. A validation by a later
            attempt replaces `val_loss`.
        replaced: records for steps that were repeated or lost, one ascending group per resume or rollback.
        results: contents of the file `finished`; None if the file is missing or unreadable.
        num_unreadable: lines in metrics.jsonl and in event files that hold no record.
    """

    path: Path
    config: Config | None
    config_text: str
    config_problem: str
    steps: Sequence[Mapping[str, Any]]
    replaced: Sequence[Sequence[Mapping[str, Any]]]
    events: Sequence[Event]
    attempts: Sequence[Attempt]
    checkpoints: Sequence[SavedStep]
    results: Mapping[str, Any] | None
    num_unreadable: int

    @property
    def layout(self) -> Mapping[str, Any]:
        """Layout of the last attempt that recorded one; empty if none did."""
        return next((attempt.layout for attempt in reversed(self.attempts) if attempt.layout), {})

    @property
    def state(self) -> str:
        """The run's state in words: `finished`, `not started`, or how the last attempt ended."""
        if self.results is not None:
            return "finished"
        return self.attempts[-1].end if self.attempts else "not started"


def read_run(path: Path) -> RunRecord:
    """Read a run directory.

    Raises:
        TriaxisError: the folder is not a run directory.
        StorageError: a file in it cannot be read.
    """
    with explaining_storage(path, "a report", "Make it as a user who can read the files of the run."):
        return _read(path)


def _read(path: Path) -> RunRecord:
    if not any((path / name).is_file() for name in ("config.yaml", "metrics.jsonl")) and not events_files(path):
        raise TriaxisError(
            f"{path} is no run directory: it has neither config.yaml nor metrics.jsonl nor events, so there is nothing to "
            "report. Give the folder of a run, such as runs/gpt_tiny."
        )
    config, config_text, problem = _read_config(path / "config.yaml")
    metrics, events = read_records(path / "metrics.jsonl", kept=Rows()), read_events(path)
    records = [each for each in metrics.records if isinstance(each.get("step"), int)]
    steps, replaced = _latest(records)
    steps = _with_later_validations(steps, events.events)
    results = _read_json(path / "finished")
    return RunRecord(
        path=path,
        config=config,
        config_text=config_text,
        config_problem=problem,
        steps=steps,
        replaced=replaced,
        events=events.events,
        attempts=_attempts(records, events.events),
        checkpoints=_checkpoints(path),
        results=results,
        num_unreadable=metrics.num_unreadable + events.num_unreadable + len(metrics.records) - len(records),
    )


def number(record: Mapping[str, Any], *keys: str) -> float:
    """Read the number at nested `keys` in a record; NaN if there is none. The texts "nan" and "inf" count as numbers."""
    return as_number(value_at(record, *keys))


def value_at(record: Mapping[str, Any], *keys: str) -> Any:
    """Read the value at nested `keys` in a record; None if a key is missing."""
    value: Any = record
    for key in keys:
        # `isinstance(.., Mapping)` would take longer than everything else here.
        value = value.get(key) if isinstance(value, dict | Row) else None
    return value


def as_number(value: Any) -> float:
    """Convert a record's value to float; NaN for None, a bool, or anything that float() refuses."""
    try:
        return math.nan if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _read_config(path: Path) -> tuple[Config | None, str, str]:
    if not path.is_file():
        return None, "", "there is no config.yaml"
    try:
        text = read_regular(path).decode(errors="replace")
    except OSError as error:
        return None, "", f"config.yaml cannot be read: {reason(error)}"
    try:
        return load_config(path), text, ""
    except TriaxisError as error:
        return None, text, f"config.yaml is not one of this version of Triaxis: {str(error).splitlines()[0]}"


def _read_json(path: Path) -> Mapping[str, Any] | None:
    try:
        return read_object(path)
    except (OSError, ValueError):
        return None


def attempt_of(record: Mapping[str, Any]) -> int:
    """Read the number of the attempt that made a record; 0 if the record has none."""
    attempt = record.get("attempt")
    return attempt if isinstance(attempt, int) else 0


def _latest(
    records: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[list[Mapping[str, Any]]]]:
    """Split the records into the run's history and the replaced records.

    A record whose step is not later than the previous record's marks a resume or a rollback. It replaces the history from its step
    on.
    """
    history: list[Mapping[str, Any]] = []
    replaced: list[list[Mapping[str, Any]]] = []
    for record in records:
        gone = []
        while history and history[-1]["step"] >= record["step"]:
            gone.append(history.pop())
        if gone:
            replaced.append(gone[::-1])
        history.append(record)
    return history, replaced


def _with_later_validations(steps: Sequence[Mapping[str, Any]], events: Sequence[Event]) -> list[Mapping[str, Any]]:
    """Add `val_loss` to the records of steps that a later attempt validated."""
    later = {event.step: event for event in events if event.kind == "validation"}
    found: list[Mapping[str, Any]] = []
    for record in steps:
        event = later.get(record["step"])
        if event is not None and event.attempt > attempt_of(record):
            record = {**record, "val_loss": event.details.get("val_loss")}
        found.append(record)
    return found


def _attempts(records: Sequence[Mapping[str, Any]], events: Sequence[Event]) -> list[Attempt]:
    made: dict[int, list[int]] = {}
    for record in records:
        made.setdefault(attempt_of(record), []).append(record["step"])
    found = []
    numbers = sorted(made.keys() | {event.attempt for event in events})
    for attempt in numbers:
        own = [event for event in events if event.attempt == attempt]
        layout = next((event.details.get("layout") for event in own if event.kind == "attempt_started"), None)
        steps = made.get(attempt)
        found.append(
            Attempt(
                number=attempt,
                started=own[0].unix_time_seconds if own else None,
                first_step=steps[0] if steps else None,
                last_step=steps[-1] if steps else None,
                end=_end(own, has_successor=attempt != numbers[-1]),
                layout=layout if isinstance(layout, dict) else {},
            )
        )
    return found


def _end(events: Sequence[Event], *, has_successor: bool) -> str:
    """Describe how an attempt ended, from its events. `has_successor` tells whether a later attempt exists."""
    kinds = {event.kind: event for event in events}
    if "finished" in kinds:
        return "finished"
    for kind in ("stopped", "phase_ended", "stage_ended"):
        if kind in kinds:
            return str(kinds[kind].details.get("reason", "stopped"))
    if "failed" in kinds:
        return "failed"
    if "hang" in kinds and "attempt_ended" not in kinds:
        return "hung"
    if "attempt_ended" in kinds:
        return "ended"
    return "killed: no end is recorded" if has_successor else "killed, or still running: no end is recorded"


def _checkpoints(path: Path) -> list[SavedStep]:
    found = []
    for step, saved in CheckpointDirectory(folder_of_run(path)).steps().items():
        try:
            manifest = parse_manifest(saved)
        except CheckpointError as error:
            found.append(SavedStep(saved.name, step, None, "", str(error).splitlines()[0]))
        else:
            found.append(SavedStep(saved.name, step, manifest.num_bytes, manifest.written_at, ""))
    return found
