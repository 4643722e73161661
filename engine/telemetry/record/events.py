"""Records a run's events from any rank, over all attempts, in one file per node.

    events/node_00000.jsonl    {"unix_time_seconds": 1.76e9, "attempt": 0, "kind": "validation", "step": 50, "val_loss": 2.31}
    events/node_00007.jsonl    {"unix_time_seconds": 1.76e9, "attempt": 0, "kind": "hang", "step": 61, "rank": 58, "message": ...}
                               {"unix_time_seconds": 1.76e9, "att    <- the rank was killed here: readers ignore this line

A record is flat: `unix_time_seconds`, `attempt`, `kind`, then `step`, `rank` and `message` if present, then the kind's own details
by name. Floats that are not finite are the strings "nan", "inf", "-inf" (`triaxis.engine.telemetry.record.jsonl`).

To write one:

    telemetry.event("non_finite", step=7, message="loss is nan: the update was left out", loss=loss)    rank 0, in the loop
    EventLog(directory.events(node=7), directory.attempt, rank=58).write("hang", step=7, message=...)   any rank, any thread

**One file per node.** A line is one write(2) to a file opened with O_APPEND. On a local file system, and within one NFS client,
lines from a node's ranks and threads never mix, up to 2 GiB - 4 KiB. NFS clients share no lock, so two nodes would overwrite each
other's lines in one file. The node's number in the layout names the file, so later attempts append to the file on any host.

**Reading.** `read_events` merges a run's files. It also reads `events.jsonl`, the single file that older versions wrote.

Rank 0's event log cuts off a torn last line. The other ranks' logs only begin a new line after it. To add a kind of event, add a
word to `EventKind`, and to `ALERTS` if a person should know at once.
"""

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from triaxis.engine.run.entries import events_files
from triaxis.engine.storage.redaction import without_secrets
from triaxis.engine.telemetry.record.jsonl import JsonLines, read_records

NOTHING_READ: Mapping[str, int] = MappingProxyType({})

EventKind = Literal[
    "attempt_started",
    "log_healed",
    "begun",
    "validation",
    "checkpoint_saved",
    "checkpoint_failed",
    "checkpoints_retired",
    "checkpoints_swept",
    "fingerprint",
    "profiled",
    "sink_failed",
    "output_stopped",
    "output_resumed",
    "output_dropped",
    "directory_put_back",
    "wandb",
    "non_finite",
    "loss_spike",
    "outlier",
    "no_labels",
    "experts_overflow",
    "rolled_back",
    "replicas_differ",
    "slow_rank",
    "allocator_retry",
    "compiled",
    "memory",
    "hang",
    "stopped",
    "phase_ended",
    "failed",
    "attempt_ended",
    "finished",
]
"""Event kinds; the event's fields hold the details."""

ALERTS: Mapping[str, Literal["ERROR", "WARN"]] = {
    "non_finite": "ERROR",
    "replicas_differ": "ERROR",
    "hang": "ERROR",
    "failed": "ERROR",
    "experts_overflow": "ERROR",
    "loss_spike": "WARN",
    "outlier": "WARN",
    "no_labels": "WARN",
    "rolled_back": "WARN",
    "checkpoint_failed": "WARN",
    "sink_failed": "WARN",
    "output_stopped": "WARN",
    "directory_put_back": "WARN",
    "slow_rank": "WARN",
    "stopped": "WARN",
}
"""Event kinds that alert a person, with their severity: wandb sends an alert, and the report shows them in colour."""

_TYPES: Mapping[str, Any] = {
    "unix_time_seconds": float | int,
    "attempt": int,
    "kind": str,
    "step": int | None,
    "rank": int | None,
    "message": str | None,
}
"""Types of the fields that any kind may have, checked when an event is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One moment in a run.

    Attributes:
        unix_time_seconds: time at which the event was written.
        attempt: number of times the run had been started before this attempt.
        kind: one of `EventKind`; a file from another version may hold other words.
        step: step, counted from 1; None if the event belongs to no step.
        rank: rank that the event concerns, by default the writer; None for the whole run.
        message: text for people on what happened and what the run does; "" if the details suffice.
        details: the kind's own fields, as JSON values.
    """

    unix_time_seconds: float
    attempt: int
    kind: str
    step: int | None = None
    rank: int | None = None
    message: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_record(self) -> dict[str, Any]:
        """Convert to a flat JSON object of the non-empty fields and all `details`, by name."""
        assert not set(self.details) & set(_TYPES), f"{sorted(self.details)}: a detail has the name of a field"
        own = {name: getattr(self, name) for name in _TYPES}
        return {**{name: value for name, value in own.items() if value not in (None, "")}, **self.details}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Event":
        """Read an event from the JSON object on its line.

        Raises:
            ValueError: a field is missing or has the wrong type.
        """
        for name, types in _TYPES.items():
            if not isinstance(record.get(name), types):
                raise ValueError(f"{name} = {record.get(name)!r} is not of type {types}")
        own = {name: record[name] for name in _TYPES if record.get(name) is not None}
        return cls(**own, details={name: value for name, value in record.items() if name not in _TYPES})


class EventLog:
    """Appends one rank's events to the node's event file.

    Args:
        path: event file, `RunDirectory.events(node)`; it and its folder are created if missing.
        rank: this process's rank; None on rank 0, whose events concern the whole run. Only rank 0 cuts off a torn last line.
    """

    def __init__(self, path: Path, attempt: int, rank: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lines = JsonLines(path, heals=rank is None)
        self._attempt = attempt
        self._rank = rank

    def write(
        self, kind: EventKind, *, step: int | None = None, rank: int | None = None, message: str = "", **details: Any
    ) -> None:
        """Append an event with the current time. On return the operating system has the line, unless the disk refuses it.

        Args:
            step: step, counted from 1.
            rank: rank that the event concerns, if it is not the writer.
            message: text for people; "" for none.
            details: JSON values; floats need not be finite.
        """
        event = Event(
            unix_time_seconds=time.time(),
            attempt=self._attempt,
            kind=kind,
            step=step,
            rank=self._rank if rank is None else rank,
            message=without_secrets(message),
            details={name: without_secrets(it) if isinstance(it, str) else it for name, it in details.items()},
        )
        self.lines.write(event.to_record())

    def close(self) -> None:
        self.lines.close()


@dataclass(frozen=True, slots=True)
class EventsRead:
    """Events read from a run directory.

    Attributes:
        events: events from all nodes, by attempt and time; events in one file keep their line order.
        num_unreadable: number of lines, torn ends included, that hold no event.
        ends: byte at which reading stopped in each file, by path in the run directory.
    """

    events: Sequence[Event]
    num_unreadable: int
    ends: Mapping[str, int]


def read_events(run: Path, since: Mapping[str, int] = NOTHING_READ) -> EventsRead:
    """Read the events from all nodes in a run directory, merged by attempt and time.

    If two nodes' clocks differ, events close in time may swap places. Attempts never mix. If there is no file, the result is empty.

    Args:
        since: `ends` from an earlier call; only what was appended after that call is read.
    """
    found: list[list[Event]] = []
    num_unreadable, ends = 0, dict(since)
    for path in events_files(run):
        name = str(path.relative_to(run))
        read = read_records(path, ends.get(name, 0))
        ends[name] = read.end
        num_unreadable += read.num_unreadable
        events = []
        for record in read.records:
            try:
                events.append(Event.from_record(record))
            except ValueError:
                num_unreadable += 1
        found.append(events)
    merged = heapq.merge(*found, key=lambda event: (event.attempt, event.unix_time_seconds))
    return EventsRead(list(merged), num_unreadable, ends)
