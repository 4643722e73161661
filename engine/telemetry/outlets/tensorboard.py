"""Writes TensorBoard event files in the run directory, with the chart names that wandb gets.

torch is imported when the sink is first opened.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any, Self

from triaxis.engine.config.tree import Config
from triaxis.engine.errors import TriaxisError
from triaxis.engine.program import install
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.storage.state_files import try_to_write
from triaxis.engine.telemetry.outlets.charts import Charts
from triaxis.engine.telemetry.outlets.sink import Sink
from triaxis.engine.telemetry.record.metrics import StepMetrics


class TensorBoardSink(Sink):
    """Sink that writes each step to TensorBoard event files, one set per attempt.

    A session start is written before the first step and before each repeated step. TensorBoard then discards
    older points from that step on.

    Raises:
        OSError: the folder cannot be written; no empty file is left in it.
    """

    name = "tensorboard"

    def __init__(self, directory: RunDirectory, charts: Charts) -> None:
        from torch.utils.tensorboard import SummaryWriter

        try_to_write(directory.tensorboard)
        self._writer = SummaryWriter(log_dir=str(directory.tensorboard), flush_secs=30)
        self._charts = charts
        self._last_step: int | None = None

    @classmethod
    def check(cls) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise TriaxisError(
                "telemetry.tensorboard = true, but the package tensorboard is not installed; the run would have no event files. "
                f"Install it with  {install('tensorboard')}  or set telemetry.tensorboard=false."
            )

    @classmethod
    def open(cls, config: Config, directory: RunDirectory, layout: Mapping[str, Any]) -> Self:
        return cls(directory, Charts.of_run(config, layout))

    def record(self, metrics: StepMetrics) -> None:
        if self._last_step is None or metrics.step <= self._last_step:
            self._begin_at(metrics.step)
        self._last_step = metrics.step
        for name, value in self._charts.of(metrics).items():
            self._writer.add_scalar(name, value, metrics.step)

    def _begin_at(self, step: int) -> None:
        """Write a session start at `step`, so that TensorBoard discards older points from `step` on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        started = Event(session_log=SessionLog(status=SessionLog.START))
        self._writer._get_file_writer().add_event(started, step)

    def close(self) -> None:
        self._writer.close()
