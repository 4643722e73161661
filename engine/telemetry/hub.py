"""Telemetry: one object that every rank has, and that speaks on one of them.

    on_step, on_validation  ->  Telemetry  ->  Report       terminal and log, at once
                                           `->  sinks       metrics.jsonl, wandb, TensorBoard; after its validation if one follows
                                           `->  events  ->  wandb's alerts

A sink that fails is told no more: that it failed is an event and a line on the terminal, and training goes on. Files on a full disk
keep their rows and write them when there is room; a terminal that fails is dropped. Each such change is an event and a line too.
A loss is agreed by all ranks, so rank 0 can log; on the others every call returns at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from engine.config import Config
from engine.telemetry.console import Report
from engine.telemetry.events import EventKind, EventLog
from engine.telemetry.jsonl import JsonLines, MetricsLog
from engine.telemetry.metrics import StepMetrics
from engine.telemetry.rank_log import OutputChange, Streams
from engine.telemetry.redaction import without_secrets
from engine.telemetry.relay import RESUMED, STOPPED
from engine.telemetry.run_dir import RunDirectory
from engine.telemetry.tensorboard_sink import TensorBoardSink, check_installed
from engine.telemetry.wandb_sink import WandbSink

_LAST_WORDS_SECONDS = 15.0


class Sink(Protocol):
    """Where the record of a step goes."""

    @property
    def name(self) -> str: ...
    def record(self, metrics: StepMetrics) -> None: ...
    def close(self) -> None: ...


class Telemetry:
    """What is written down about a run.

    Args:
        report: for people; None on ranks that do not log.
        events: None on ranks that do not log.
        sinks: where each step's record goes.
        output_changes: takes the changes of terminal and log since its last call.
    """

    def __init__(
        self,
        report: Report | None = None,
        events: EventLog | None = None,
        sinks: Sequence[Sink] = (),
        output_changes: Callable[[], Sequence[OutputChange]] = tuple,
    ) -> None:
        self.report = report
        self._events = events
        self._sinks = list(sinks)
        self._output_changes = output_changes
        self._stopped_files: list[JsonLines] = []
        self._pending: StepMetrics | None = None
        self._last_step: int | None = None

    def step(self, metrics: StepMetrics) -> None:
        """A step has ended. The sinks get it with `flush`, or with its validation's loss if one comes first."""
        self.flush()
        self._pending = metrics
        self._last_step = metrics.step
        if self.report is not None:
            self.report.step(metrics)
        self._look_at_outputs()

    def validation(self, step: int, loss: float, seconds: float) -> None:
        """A validation after `step` steps (counted from 1) has ended."""
        if self._pending is not None and self._pending.step == step:
            self._pending = replace(self._pending, val_loss=loss)
        self.event("validation", step=step, val_loss=loss, seconds=seconds)
        if self.report is not None:
            self.report.validation(step, loss, seconds)
        self.flush()

    def event(self, kind: EventKind, **fields: Any) -> None:
        """Something happened; on ranks that do not log, to nobody's interest."""
        if self._events is None:
            return
        try:
            self._events.write(kind, **fields)
        except Exception as error:
            self._events = None
            self._say(f"the log of events is switched off: {error}")
        for sink in tuple(self._sinks):
            if isinstance(sink, WandbSink):
                self._guard(sink, sink.send_alerts)

    def flush(self) -> None:
        """Hand the last step to the sinks: no validation of it will follow."""
        if self._pending is None:
            return
        metrics, self._pending = self._pending, None
        for sink in tuple(self._sinks):
            self._guard(sink, partial(sink.record, metrics))

    def close(self) -> None:
        """Flush and close everything; may be called after an error, and twice."""
        self.flush()
        self._look_at_outputs()
        if self.report is not None:
            self.report.close()
        for sink in tuple(self._sinks):
            self._guard(sink, sink.close)
            if isinstance(sink, WandbSink) and sink.sync_command is not None:
                self._say(f"wandb kept the run on disk ({sink.why}); to upload it: {sink.sync_command}", "")
        files = self._files()
        self._sinks.clear()
        self.event("attempt_ended", step=self._last_step)
        if self._events is not None:
            self._events.close()
            self._events = None
        for file in files:
            if file.error is not None:
                self._say(f"{file.path.name}: {file.num_lost} rows could not be written: {_cause(file.error)}")

    def last_words(self) -> None:
        """The process is about to be ended by another thread than the loop's, which hangs: wandb would lose what it has not
        written yet, the alert too. Bounded in time; on ranks that do not log, nothing."""
        for sink in tuple(self._sinks):
            if isinstance(sink, WandbSink):
                self._guard(sink, partial(sink.close, _LAST_WORDS_SECONDS))

    def add_sink(self, name: str, open_sink: Callable[[], Sink]) -> Sink | None:
        """Open a sink; one that cannot be opened is an event, and None."""
        try:
            sink = open_sink()
        except Exception as error:
            self._failed(name, error)
            return None
        self._sinks.append(sink)
        return sink

    def _files(self) -> list[JsonLines]:
        metrics = [sink.lines for sink in self._sinks if isinstance(sink, MetricsLog)]
        return metrics if self._events is None else [*metrics, self._events.lines]

    def reopen_files(self) -> None:
        """Append to new files of metrics and events: the run directory was removed or moved, and is there again.

        Raises:
            OSError: one cannot be opened.
        """
        for file in self._files():
            file.reopen()

    def _look_at_outputs(self) -> None:
        """Write an event and a line for each file that has stopped or resumed, and for each change of terminal and log."""
        for file in self._files():
            file.retry()
            name = file.path.name
            if file.error is not None and file not in self._stopped_files:
                self._stopped_files.append(file)
                self._output_event(OutputChange(name, STOPPED, _cause(file.error)))
            elif file.error is None and file in self._stopped_files:
                self._stopped_files.remove(file)
                self._output_event(OutputChange(name, RESUMED, "", file.num_lost))
        for change in self._output_changes():
            self._output_event(change)

    def _output_event(self, change: OutputChange) -> None:
        if change.what == STOPPED:
            message = f"{change.output} cannot be written ({change.cause}): training goes on, and it is tried again"
            self.event("output_stopped", output=change.output, message=message)
        elif change.what == RESUMED:
            lost = f"{change.num_lost} rows or lines are missing" if change.num_lost else "nothing is missing"
            message = f"{change.output} is written again; {lost}"
            self.event("output_resumed", output=change.output, message=message, num_lost=change.num_lost)
        else:
            message = f"the {change.output} cannot be written any more ({change.cause}): the run goes on without it"
            self.event("output_dropped", output=change.output, message=message)
        self._say(message)

    def _guard(self, sink: Sink, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._sinks.remove(sink)
            self._failed(sink.name, error)

    def _failed(self, name: str, error: Exception) -> None:
        self.event("sink_failed", sink=name, error=f"{type(error).__name__}: {error}")
        self._say(f"{name} is switched off, training goes on: {type(error).__name__}: {error}")

    def _say(self, text: str, style: str = "yellow") -> None:
        if self.report is not None:
            self.report.say(without_secrets(text), style)


def _cause(error: OSError) -> str:
    return error.strerror or str(error)


def open_telemetry(
    config: Config,
    directory: RunDirectory,
    *,
    is_logging_rank: bool,
    streams: Streams,
    num_steps: int,
    show_mfu: bool,
    layout: Mapping[str, Any],
) -> Telemetry:
    """The telemetry of one rank: with sinks on the logging rank, silent on the others.

    Args:
        config: `telemetry` says which sinks.
        directory: of the run.
        is_logging_rank: true on rank 0 alone.
        streams: of this rank, from `rank_log`.
        num_steps: of the whole run.
        show_mfu: whether a peak is known.
        layout: parallel sizes, device and what else wandb should filter by.

    Raises:
        TriaxisError: TensorBoard was asked for and is not installed; on every rank.
    """
    if config.telemetry.tensorboard:
        check_installed()
    if not is_logging_rank:
        return Telemetry()
    report = Report(
        num_steps, config.telemetry.log_interval, terminal=streams.terminal, log=streams.log, show_mfu=show_mfu
    )
    events = EventLog(directory.events(node=0), directory.attempt)
    telemetry = Telemetry(report, events, output_changes=streams.changes)
    telemetry.event("attempt_started", layout=dict(layout))
    metrics = telemetry.add_sink(MetricsLog.name, lambda: MetricsLog(directory.metrics))
    for lines in (events.lines, *([metrics.lines] if isinstance(metrics, MetricsLog) else [])):
        if lines.num_healed_bytes:
            telemetry.event("log_healed", file=lines.path.name, bytes_cut_off=lines.num_healed_bytes)
    if config.telemetry.wandb is not None:
        sink = telemetry.add_sink(WandbSink.name, lambda: WandbSink(config, directory, layout))
        if isinstance(sink, WandbSink):
            telemetry.event("wandb", mode=sink.mode, why=sink.why, url=sink.url, sync_command=sink.sync_command)
            report.say(f"wandb: {sink.url}" if sink.url is not None else f"wandb is {sink.mode}: {sink.why}")
    if config.telemetry.tensorboard:
        telemetry.add_sink(TensorBoardSink.name, lambda: TensorBoardSink(directory))
    return telemetry
