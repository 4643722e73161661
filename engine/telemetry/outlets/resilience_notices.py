"""What is said and written down when something went wrong (`engine.resilience.guard.Notices`), on every rank; rank 0 speaks."""

from typing import Any

from engine.telemetry.outlets.hub import Telemetry
from engine.telemetry.record.events import EventKind


class TroubleNotices:
    """Events and lines about trouble."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def on_trouble(self, kind: EventKind, step: int, message: str, **details: Any) -> None:
        """Report what happened in step number `step`, counted from 0; the record counts from 1."""
        self._telemetry.event(kind, step=step + 1, message=message, **details)
        if self._telemetry.report is not None:
            self._telemetry.report.say(message, "yellow")
