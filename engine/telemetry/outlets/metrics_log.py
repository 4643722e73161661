"""Writes metrics.jsonl, which every run has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from triaxis.engine.config.tree import Config
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.telemetry.outlets.sink import Sink
from triaxis.engine.telemetry.record.jsonl import JsonLines
from triaxis.engine.telemetry.record.metrics import StepMetrics


class MetricsLog(Sink):
    """Sink that writes one JSON object per step."""

    name = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        self.lines: JsonLines = JsonLines(path)

    @classmethod
    def open(cls, config: Config, directory: RunDirectory, layout: Mapping[str, Any]) -> Self:
        return cls(directory.metrics)

    def record(self, metrics: StepMetrics) -> None:
        self.lines.write(metrics.to_record())

    def close(self) -> None:
        self.lines.close()
