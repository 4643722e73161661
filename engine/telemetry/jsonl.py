"""metrics.jsonl and events.jsonl: one JSON object per line, there as soon as it is written (no torch here).

    {"step": 1, "attempt": 0, ..., "loss": 5.5491, ...}\n
    {"step": 2, "attempt": 0, ..., "loss": 5.4710, ...}\n
    {"step": 3, "att                                      <- the run was killed here: cut off when the file is opened again

Floats are written with all their digits: reading gives the same float64. JSON knows no NaN and no infinity; those are
written as the strings "nan", "inf", "-inf".
"""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from engine.telemetry.metrics import StepMetrics

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
    "wandb",
    "failed",
    "attempt_ended",
    "finished",
]
"""Kinds of events. Each is a moment of the run; its fields say the rest."""


class JsonLines:
    """A file to which objects are appended, over all attempts of a run.

    Args:
        path: made where it is missing. A last line that is not whole is cut off.

    Attributes:
        num_healed_bytes: how much of a half-written line was cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_healed_bytes = heal(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object; it has left this process when this returns."""
        self._file.write(json.dumps(_plain(record), allow_nan=False, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def heal(path: Path) -> int:
    """Make a file end with a whole line; returns the number of bytes cut off.

    A last line that is a whole object and lacks only its newline gets one.
    """
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = _start_of_last_line(file.fileno(), size)
        file.seek(start)
        rest = file.read()
        if not rest:
            return 0
        try:
            json.loads(rest)
        except ValueError:
            file.truncate(start)
            return len(rest)
        file.write(b"\n")
        return 0


def _start_of_last_line(descriptor: int, size: int) -> int:
    """Just behind the last newline, read backwards in blocks: the file of a long run is large."""
    block_bytes = 64 * 2**10
    end = size
    while end > 0:
        start = max(0, end - block_bytes)
        at = os.pread(descriptor, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


class MetricsLog:
    """The sink behind metrics.jsonl."""

    name = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        self.lines = JsonLines(path)

    def record(self, metrics: StepMetrics) -> None:
        self.lines.write(metrics.to_record())

    def close(self) -> None:
        self.lines.close()


class EventLog:
    """events.jsonl: what happened, when, in which attempt."""

    def __init__(self, path: Path, attempt: int) -> None:
        self.lines = JsonLines(path)
        self._attempt = attempt

    def write(self, kind: EventKind, **fields: Any) -> None:
        """Append `{unix_time_seconds, attempt, kind, ...fields}`."""
        self.lines.write({"unix_time_seconds": time.time(), "attempt": self._attempt, "kind": kind, **fields})

    def close(self) -> None:
        self.lines.close()
