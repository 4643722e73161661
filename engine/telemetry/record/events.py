"""The events of a run: moments that any rank writes down, over all attempts, one file per node.

    events/node_00000.jsonl    {"unix_time_seconds": 1.76e9, "attempt": 0, "kind": "validation", "step": 50, "val_loss": 2.31}\n
    events/node_00007.jsonl    {"unix_time_seconds": 1.76e9, "attempt": 0, "kind": "hang", "step": 61, "rank": 58, "message": ...}\n
                               {"unix_time_seconds": 1.76e9, "att    <- killed here: readers leave it out

A record is flat: `unix_time_seconds`, `attempt`, `kind`, then `step`, `rank` and `message` where there is one, then the details
of its kind under their own names. Floats that are not finite are the strings "nan", "inf", "-inf"
(`triaxis.engine.telemetry.record.jsonl`).

To write one:

    telemetry.event("non_finite", step=7, message="loss is nan: the update was left out", loss=loss)    rank 0, in the loop
    EventLog(directory.events(node=7), directory.attempt, rank=58).write("hang", step=7, message=...)   any rank, any thread

**One file per node.** A line is one write(2) to a file opened with O_APPEND. On a local file system, and on NFS between processes
of one client, Linux holds the file's lock while it finds the end and copies the bytes. So lines of a node's ranks and threads never
mix, up to the longest write that Linux makes, 2 GiB - 4 KiB. Clients of NFS do not share that lock: lines of two nodes in one file
would overwrite each other. The node's number in the layout names the file, so later attempts append to it, on whichever host.

**Reading.** `read_events` merges all files of a run; nothing else opens them. It also reads `events.jsonl`, the one file of runs
from before the nodes had their own.

Rank 0's log cuts off a torn last line, the others only begin a new one. A new kind is one more word in `EventKind`, and in
`ALERTS` where a person should know at once; `triaxis report` shows all of them: `message` first, then the details.
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
    "memory",
    "hang",
    "stopped",
    "phase_ended",
    "failed",
    "attempt_ended",
    "finished",
]
"""Kinds of events. Each is a moment of the run; its fields have the rest."""

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
"""Kinds that alert a person, and how bad they are: wandb sends an alert, the report shows them in colour."""

_TYPES: Mapping[str, Any] = {
    "unix_time_seconds": float | int,
    "attempt": int,
    "kind": str,
    "step": int | None,
    "rank": int | None,
    "message": str | None,
}
"""The fields that every kind may have, as they are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One moment of a run.

    Attributes:
        unix_time_seconds: when it was written.
        attempt: how often this run had been started before.
        kind: one of `EventKind`; from a file of another version possibly another word.
        step: counts from 1; None where it belongs to no step.
        rank: that wrote it, or that it is about; None where it is about the whole run.
        message: for people, what happened and what follows; "" where the details suffice.
        details: the fields of its kind; JSON values.
    """

    unix_time_seconds: float
    attempt: int
    kind: str
    step: int | None = None
    rank: int | None = None
    message: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_record(self) -> dict[str, Any]:
        """Return the flat JSON object."""
        assert not set(self.details) & set(_TYPES), f"{sorted(self.details)}: a detail has the name of a field"
        own = {name: getattr(self, name) for name in _TYPES}
        return {**{name: value for name, value in own.items() if value not in (None, "")}, **self.details}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Event":
        """Read the event of a line.

        Raises:
            ValueError: it is none: a field is missing or has the wrong type.
        """
        for name, types in _TYPES.items():
            if not isinstance(record.get(name), types):
                raise ValueError(f"{name} = {record.get(name)!r} is not of type {types}")
        own = {name: record[name] for name in _TYPES if record.get(name) is not None}
        return cls(**own, details={name: value for name, value in record.items() if name not in _TYPES})


class EventLog:
    """A node's file of events, as one rank appends to it.

    Args:
        path: of the file, `RunDirectory.events(node)`; it and its folder are made where they are missing.
        rank: of this process; None on rank 0, whose events are about the whole run. Only that one cuts off a torn last line.
    """

    def __init__(self, path: Path, attempt: int, rank: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lines = JsonLines(path, heals=rank is None)
        self._attempt = attempt
        self._rank = rank

    def write(
        self, kind: EventKind, *, step: int | None = None, rank: int | None = None, message: str = "", **details: Any
    ) -> None:
        """Append an event of now; it has left this process when this returns, unless the disk is full (`JsonLines`).

        Args:
            step: counts from 1.
            rank: that it is about, where that is not the one that writes.
            details: JSON values, floats that are not finite too.
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
    """The result of a reading.

    Attributes:
        events: of all nodes, by attempt and time; those of one file in the order of its lines.
        num_unreadable: lines, and torn ends, that hold no event.
        ends: bytes up to which each file was read, by its path in the run directory. A torn end is not passed.
    """

    events: Sequence[Event]
    num_unreadable: int
    ends: Mapping[str, int]


def read_events(run: Path, since: Mapping[str, int] = NOTHING_READ) -> EventsRead:
    """Read the events of all nodes of a run directory, merged by attempt and time; none where there is no file.

    Clocks of nodes may differ, so events of two nodes that are closer than that may change places. Attempts never mix.

    Args:
        since: the `ends` of an earlier reading; only what was appended after it is read.
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
