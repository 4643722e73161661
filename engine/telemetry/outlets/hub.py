"""Provides each rank's telemetry object, which has outlets on the logging rank only.

    on_step, on_validation  ->  Telemetry  ->  Report       terminal and log, at once
                                           `->  sinks       metrics.jsonl, wandb, TensorBoard; once a due validation has its loss
                                           `->  events  ->  wandb's alerts

Training goes on when an output fails. An event and a line on the terminal report each failure and each recovery. After a failure:

    metrics.jsonl, events    rows wait in memory, and are written when there is room
    TensorBoard              is opened again after a pause; the steps in between are missing, and are counted
    wandb                    is switched off for good, because opening it again would make the ranks wait for a network
    the terminal             is dropped for good

All ranks have the same losses, so only rank 0 logs. On the other ranks every call returns at once.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from triaxis.engine.config.tree import Config
from triaxis.engine.errors import counted
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.storage.redaction import without_secrets
from triaxis.engine.telemetry.outlets.console import Report
from triaxis.engine.telemetry.outlets.lossy_file import LossyFile
from triaxis.engine.telemetry.outlets.rank_log import RankStreams
from triaxis.engine.telemetry.outlets.sink import Sink, chosen_sinks
from triaxis.engine.telemetry.outlets.table import MEMORY
from triaxis.engine.telemetry.outlets.terminal import Terminal
from triaxis.engine.telemetry.record.events import EventKind, EventLog
from triaxis.engine.telemetry.record.jsonl import JsonLines
from triaxis.engine.telemetry.record.metrics import StepMetrics

_CLOSE_SECONDS = 15.0

_SHORTEST_PAUSE_SECONDS = 30.0
_LONGEST_PAUSE_SECONDS = 1800.0
"""Pauses before a sink is opened again: the first one, and the upper bound. Each pause is twice as long as the one before."""


@dataclass(slots=True)
class _Stopped:
    """A failed sink that will be opened again.

    Attributes:
        cause: the sink's first error.
        pause_seconds: pause between the last try and the next.
        next_try_seconds: time of the next try, on `Telemetry`'s clock.
        num_lost: number of steps that the sink has missed.
    """

    cause: str
    pause_seconds: float
    next_try_seconds: float
    num_lost: int = 0


class Telemetry:
    """Sends one run's records, events and messages to its outlets. On ranks that do not log there are no outlets.

    Args:
        report: output for people; None on ranks that do not log.
        events: event log; None on ranks that do not log.
        sinks: destinations for each step's record.
        outputs: the rank's log and terminal, whose failures and recoveries are reported.
        clock: function () -> seconds, which times the pauses before a sink is opened again.
    """

    def __init__(
        self,
        report: Report | None = None,
        events: EventLog | None = None,
        sinks: Sequence[Sink] = (),
        outputs: Sequence[LossyFile | Terminal] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.report = report
        self._events = events
        self._sinks = list(sinks)
        self._outputs = outputs
        self._clock = clock
        self._stopped_outputs: list[JsonLines | LossyFile | Terminal] = []
        self._openers: dict[str, Callable[[], Sink]] = {}
        self._stopped_sinks: dict[str, _Stopped] = {}
        self._pending: StepMetrics | None = None
        self._last_step: int | None = None

    def step(self, metrics: StepMetrics) -> None:
        """Record a finished step. The report shows it at once; the sinks get it at the next `flush`.

        If a validation follows the step, `validation` adds the validation loss to the record first.
        """
        self.flush()
        self._pending = metrics
        self._last_step = metrics.step
        if self.report is not None:
            self.report.step(metrics)
        self._look_at_outputs()

    def validation(self, step: int, loss: float, seconds: float) -> None:
        """Record the loss of a validation after `step` completed steps. The validation took `seconds`."""
        if self._pending is not None and self._pending.step == step:
            self._pending = replace(self._pending, val_loss=loss)
        self.event("validation", step=step, val_loss=loss, seconds=seconds)
        if self.report is not None:
            self.report.validation(step, loss, seconds)
        self.flush()

    def event(self, kind: EventKind, **fields: Any) -> None:
        """Record an event, with `fields` as in `EventLog.write`, and tell the sinks (`Sink.after_event`).

        An event log that raises is switched off. No-op on ranks that do not log.
        """
        if self._events is None:
            return
        try:
            self._events.write(kind, **fields)
        except Exception as error:
            self._events = None
            self.say(f"the event log is switched off: {error}", "yellow")
        for sink in tuple(self._sinks):
            self._guard(sink, sink.after_event)

    def say(self, text: str = "", style: str = "") -> None:
        """Print lines. No-op on ranks that do not log."""
        if self.report is not None:
            self.report.say(without_secrets(text), style)

    def notice(self, kind: EventKind, message: str, *, style: str = "yellow", **fields: Any) -> None:
        """Record an event, and print its message."""
        self.event(kind, message=message, **fields)
        self.say(message, style)

    def flush(self) -> None:
        """Hand the last step's record to the sinks, after opening stopped sinks whose pause is over.

        The record can no longer get a validation loss.
        """
        if self._pending is None:
            return
        metrics, self._pending = self._pending, None
        self._open_again()
        for sink in tuple(self._sinks):
            if self._guard(sink, partial(sink.record, metrics)) and sink.name in self._stopped_sinks:
                self._resumed(sink.name)
        for stopped in self._stopped_sinks.values():
            stopped.num_lost += 1

    def close(self) -> None:
        """Flush, write `attempt_ended`, close all outlets, and print what was lost.

        It prints the sinks' summaries, and counts of unrecorded steps and unwritten rows. A call after an error and a second call
        do no harm.
        """
        self.flush()
        self._look_at_outputs()
        if self.report is not None:
            self.report.close()
        for sink in tuple(self._sinks):
            self._guard(sink, sink.close)
            if sink.summary is not None:
                self.say(sink.summary)
        for name, stopped in self._stopped_sinks.items():
            self.say(f"{name}: {_missing_steps(stopped.num_lost)} missing: {stopped.cause}", "yellow")
        files = self._files()
        self._sinks.clear()
        self._stopped_sinks.clear()
        self.event("attempt_ended", step=self._last_step)
        if self._events is not None:
            self._events.close()
            self._events = None
        for file in files:
            if file.error is not None:
                self.say(
                    f"{file.name}: {counted(file.num_lost, 'row')} could not be written: {_cause(file.error)}",
                    "yellow",
                )

    def close_early(self) -> None:
        """Write what the sinks would lose, in bounded time, before a hanging process is ended."""
        for sink in tuple(self._sinks):
            self._guard(sink, partial(sink.close_early, _CLOSE_SECONDS))

    def add_sink(self, name: str, open_sink: Callable[[], Sink], *, opens_again: bool = True) -> Sink | None:
        """Open a sink. If opening fails, write an event and return None.

        Args:
            opens_again: whether to call `open_sink` again after a failure and a pause; if so, `open_sink` must not block.
        """
        if opens_again:
            self._openers[name] = open_sink
        try:
            sink = open_sink()
        except Exception as error:
            self._failed(name, error)
            return None
        self._sinks.append(sink)
        return sink

    def _open_again(self) -> None:
        """Open the stopped sinks whose pause is over."""
        for name, stopped in self._stopped_sinks.items():
            if self._clock() < stopped.next_try_seconds or any(sink.name == name for sink in self._sinks):
                continue
            try:
                self._sinks.append(self._openers[name]())
            except Exception as error:
                self._failed(name, error)

    def _resumed(self, name: str) -> None:
        """Report that a stopped sink has accepted a step again."""
        num_lost = self._stopped_sinks.pop(name).num_lost
        self._say_resumed(name, _missing_steps(num_lost), num_lost)

    def _files(self) -> list[JsonLines]:
        files = [sink.lines for sink in self._sinks if sink.lines is not None]
        return files if self._events is None else [*files, self._events.lines]

    def reopen_files(self) -> None:
        """Open the metrics and event files again after the run directory was restored.

        Raises:
            OSError: a file cannot be opened.
        """
        for file in self._files():
            file.reopen()

    def _look_at_outputs(self) -> None:
        """Try again to write rows and lines that wait in memory, and report each output that has failed or recovered."""
        for output in (*self._files(), *self._outputs):
            output.retry()
            if output.error is not None and output not in self._stopped_outputs:
                self._stopped_outputs.append(output)
                if isinstance(output, Terminal) and output.is_gone:
                    message = (
                        f"the terminal can no longer be written ({_cause(output.error)}): the run goes on without it"
                    )
                    self.notice("output_dropped", message, output=output.name)
                else:
                    self._say_stopped(output.name, _cause(output.error))
            elif output.error is None and output in self._stopped_outputs:
                self._stopped_outputs.remove(output)
                missing = counted(output.num_lost, "row or line", "rows or lines") if output.num_lost else "nothing is"
                self._say_resumed(output.name, missing, output.num_lost)

    def _say_stopped(self, name: str, cause: str) -> None:
        message = f"{name} cannot be written ({cause}): training goes on, and writing is tried again"
        self.notice("output_stopped", message, output=name)

    def _say_resumed(self, name: str, missing: str, num_lost: int) -> None:
        message = f"{name} is written again; {missing} missing"
        self.notice("output_resumed", message, output=name, num_lost=num_lost)

    def _guard(self, sink: Sink, call: Callable[[], None]) -> bool:
        """Make a call to a sink. If it fails, remove and report the sink and return False; else True."""
        try:
            call()
        except Exception as error:
            self._sinks.remove(sink)
            self._failed(sink.name, error)
            if sink.name in self._openers:
                with suppress(Exception):
                    sink.close()
            return False
        return True

    def _failed(self, name: str, error: Exception) -> None:
        """Report a sink's failure by an event and a line.

        If the sink will be opened again, only its first failure is reported, and each failure doubles the next pause.
        """
        if name not in self._openers:
            self.event("sink_failed", sink=name, error=f"{type(error).__name__}: {error}")
            self.say(f"{name} is switched off, training goes on: {type(error).__name__}: {error}", "yellow")
            return
        stopped = self._stopped_sinks.get(name)
        if stopped is None:
            cause = _cause(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            stopped = self._stopped_sinks[name] = _Stopped(cause, _SHORTEST_PAUSE_SECONDS / 2, 0.0)
            self._say_stopped(name, cause)
        stopped.pause_seconds = min(2 * stopped.pause_seconds, _LONGEST_PAUSE_SECONDS)
        stopped.next_try_seconds = self._clock() + stopped.pause_seconds


def _missing_steps(num_lost: int) -> str:
    """Format the least number of steps that a sink lacks, as in "at least 3 steps are"."""
    return f"at least {num_lost} {'step is' if num_lost == 1 else 'steps are'}"


def _cause(error: OSError) -> str:
    return error.strerror or str(error)


def open_telemetry(
    config: Config,
    directory: RunDirectory,
    *,
    is_logging_rank: bool,
    streams: RankStreams,
    num_steps: int,
    show_mfu: bool,
    layout: Mapping[str, Any],
    device_type: str = "cpu",
) -> Telemetry:
    """Open one rank's telemetry, which records and prints on the logging rank only.

    On that rank it writes `attempt_started`, then opens and announces the sinks.

    Args:
        config: configuration; its `telemetry` section chooses the sinks.
        is_logging_rank: true on rank 0 alone.
        streams: this rank's streams, from `rank_log`.
        num_steps: number of steps in the whole run.
        show_mfu: whether to show MFU, which needs the device's peak rate.
        layout: parallel sizes, device and other fields by which wandb filters runs.
        device_type: this rank's device type: `cpu` or `cuda`.

    Raises:
        TriaxisError: a requested sink's package is not installed; raised on every rank.
    """
    chosen = chosen_sinks(config)
    for each in chosen:
        each.check()
    if not is_logging_rank:
        return Telemetry()
    report = Report(
        num_steps,
        config.telemetry.log_interval,
        terminal=streams.terminal,
        log=streams.log,
        show_mfu=show_mfu,
        memory=MEMORY[device_type],
    )
    events = EventLog(directory.events(node=0), directory.attempt)
    telemetry = Telemetry(report, events, outputs=streams.outputs)
    telemetry.event("attempt_started", layout=dict(layout))
    _report_healing(telemetry, events.lines)
    for each in chosen:
        sink = telemetry.add_sink(
            each.name, partial(each.open, config, directory, layout), opens_again=each.opens_again
        )
        if sink is None:
            continue
        if sink.lines is not None:
            _report_healing(telemetry, sink.lines)
        if (announcement := sink.announcement) is not None:
            telemetry.event(announcement.kind, **announcement.fields)
            report.say(announcement.line)
    return telemetry


def _report_healing(telemetry: Telemetry, lines: JsonLines) -> None:
    """Write an event if opening an event or metrics file has cut off a half-written last line."""
    if lines.num_healed_bytes:
        telemetry.event("log_healed", file=lines.name, bytes_cut_off=lines.num_healed_bytes)
