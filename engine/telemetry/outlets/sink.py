"""Defines sinks, the destinations for each step's record, and chooses a run's sinks.

config.telemetry  ->  chosen_sinks  ->  metrics.jsonl always; then each set sink in `engine/config/schema/telemetry.py`, SINKS
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from triaxis.engine.config.schema.telemetry import SINKS
from triaxis.engine.config.tree import Config
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.telemetry.record.events import EventKind
from triaxis.engine.telemetry.record.jsonl import JsonLines
from triaxis.engine.telemetry.record.metrics import StepMetrics


@dataclass(frozen=True, slots=True)
class Announcement:
    """Event and terminal line that report an opened sink."""

    kind: EventKind
    fields: Mapping[str, Any]
    line: str


class Sink(ABC):
    """A destination for each step's record. Only `name`, `open`, `record` and `close` are required.

    If a call raises any exception, the sink is not used until it is reopened. Training goes on.

    Attributes:
        name: sink name in events and on the terminal.
        opens_again: whether the sink is opened again after a failure; if so, `open` must not block.
        lines: the sink's JSON lines file, whose rows wait in memory while the disk is full; None if it has no such file.
        announcement: event and line to report once the sink is open, or None.
        summary: line to print after the run, or None.
    """

    name: ClassVar[str]
    opens_again: ClassVar[bool] = True
    lines: JsonLines | None = None
    announcement: Announcement | None = None
    summary: str | None = None

    @classmethod  # noqa: B027
    def check(cls) -> None:
        """Check on every rank, before the run starts, that the sink can be used.

        Raises:
            TriaxisError: a package is missing.
        """

    @classmethod
    @abstractmethod
    def open(cls, config: Config, directory: RunDirectory, layout: Mapping[str, Any]) -> Self:
        """Open the sink on the logging rank, with its files in the run directory.

        Args:
            layout: parallel sizes, device and other fields by which users filter runs.
        """

    @abstractmethod
    def record(self, metrics: StepMetrics) -> None:
        """Write a step's record, or hand it to another process. This call must not wait for a network."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left, in bounded time."""

    def after_event(self) -> None:  # noqa: B027
        """React to an event that this rank has just written to its event file."""

    def close_early(self, limit_seconds: float) -> None:  # noqa: B027
        """Write what is left, within the limit.

        Another thread calls this before it ends a hanging process.
        """


def chosen_sinks(config: Config) -> list[type[Sink]]:
    """List a run's sinks, in the order in which they are opened."""
    chosen = (path for field, path in SINKS.items() if getattr(config.telemetry, field))
    return [_load(path) for path in ("triaxis.engine.telemetry.outlets.metrics_log:MetricsLog", *chosen)]


def _load(path: str) -> type[Sink]:
    module, name = path.split(":")
    sink: type[Sink] = getattr(importlib.import_module(module), name)
    return sink
