"""Shows a run as lines on the terminal and in rank 0's log, and as a progress bar.

lines         --->  Live    a terminal: as many columns as fit, colours, the bar below the lines
              `-->  Plain   a file, a pipe, and always rank 0's log: all columns, no control sequences

training ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━  68%  204/300  loss 2.0312  ETA 0:35
"""

import io
import os
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from triaxis.engine.telemetry.outlets.format import duration, wrapped
from triaxis.engine.telemetry.outlets.table import MEMORY, Table, cells, columns_of
from triaxis.engine.telemetry.record.metrics import StepMetrics
from triaxis.engine.telemetry.timing.timers import has_line

Rows = Sequence[tuple[str, str]]
"""Labels and values; a value may have several lines."""

_COLUMNS = 80
"""Width in characters, used if the terminal does not report one."""

_ETA_STEPS = 50
"""Number of recent steps averaged for the ETA: enough to be steady, few enough to follow a change."""


class Plain:
    """A file or a pipe that gets no control sequences, and tables of any width.

    Tables are at most `width` characters wide, and wrapped text at most `text_width`.
    """

    width = 10_000
    text_width = 120

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, line: Text) -> None:
        self._file.write(line.plain.rstrip() + "\n")
        self._file.flush()


class Live:
    """A terminal, with a bar below the lines while training.

    While the bar is shown, `sys.stdout` and `sys.stderr` print above the bar and into `log`.

    Args:
        terminal: a tty.
        log: log file that also receives what is printed above the bar.
    """

    def __init__(self, terminal: TextIO, log: TextIO | None, num_steps: int) -> None:
        self._terminal = terminal
        self._log = log
        self._num_steps = num_steps
        self._console = Console(file=terminal, highlight=False, soft_wrap=True)
        self._columns = _COLUMNS
        self._bar: Progress | None = None
        self._streams: tuple[TextIO, TextIO] | None = None

    @property
    def width(self) -> int:
        """Current terminal width in characters. `_COLUMNS` if the terminal reports 0."""
        with suppress(OSError):  # the terminal has hung up: the last width stays
            self._columns = os.get_terminal_size(self._terminal.fileno()).columns or _COLUMNS
        return self._columns

    @property
    def text_width(self) -> int:
        return min(self.width, 120)

    def write(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)

    def show_step(self, metrics: StepMetrics, eta_seconds: float) -> None:
        """Update the bar. The first call shows the bar."""
        self._console.width = self.width
        shown: dict[str, Any] = {"completed": metrics.step, "loss": f"{metrics.loss:.4f}", "eta": duration(eta_seconds)}
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], **shown)
            return
        self._bar = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("ETA {task.fields[eta]}"),
            console=self._console,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
            expand=True,
        )
        self._bar.add_task("training", total=self._num_steps, **shown)
        self._bar.start()
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (_AboveBar(self, self._log, stream) for stream in self._streams)

    def show_phase(self, name: str) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=name)

    def close(self) -> None:
        """Remove the bar and restore the streams."""
        if self._streams is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = self._streams
            self._streams = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class _AboveBar(io.TextIOBase):
    """A stream that writes whole lines above the bar and into the log. `behind` is the replaced stream."""

    def __init__(self, live: Live, log: TextIO | None, behind: TextIO) -> None:
        self._live = live
        self._log = log
        self._behind = behind
        self._line = ""

    def fileno(self) -> int:
        return self._behind.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *whole, self._line = (self._line + text).split("\n")
        for line in whole:
            self._live.write(Text(line))
            if self._log is not None:
                self._log.write(line + "\n")
        return len(text)

    def flush(self) -> None:
        if self._line:
            self.write("\n")
        self._behind.flush()


class Report:
    """Output for people during a run.

    Args:
        log_interval: steps between lines, besides the first and the last step.
        terminal: standard output as the user sees it; None on ranks that are not shown.
        log: rank 0's log file; None if lines go to the terminal alone.
        show_mfu: whether to show an MFU column, which needs the device's peak rate.
        memory: heading of the memory column.
    """

    def __init__(
        self,
        num_steps: int,
        log_interval: int,
        *,
        terminal: TextIO | None,
        log: TextIO | None,
        show_mfu: bool,
        memory: str = MEMORY["cpu"],
    ) -> None:
        self._num_steps = num_steps
        self._log_interval = log_interval
        self._live = Live(terminal, log, num_steps) if terminal is not None and terminal.isatty() else None
        outlets: list[Plain | Live] = [self._live] if self._live is not None else []
        if terminal is not None and self._live is None:
            outlets.append(Plain(terminal))
        if log is not None:
            outlets.append(Plain(log))
        self._memory = memory
        columns = columns_of(num_steps, show_mfu=show_mfu, memory=memory)
        self._outlets = [(outlet, Table(columns)) for outlet in outlets]
        self._since_line: list[StepMetrics] = []
        self._recent_seconds: deque[float] = deque(maxlen=_ETA_STEPS)

    def say(self, text: str = "", style: str = "") -> None:
        """Print the lines in `text` unchanged, in a rich style."""
        for outlet, _ in self._outlets:
            for line in text.split("\n"):
                outlet.write(Text(line, style))

    def block(self, title: str, rows: Rows) -> None:
        """Print a title and labelled rows. Values too long for the terminal wrap onto indented lines."""
        label_width = max((len(label) for label, _ in rows), default=0)
        indent = 2 + label_width + 2
        for outlet, _ in self._outlets:
            outlet.write(Text(title, "bold"))
            for label, value in rows:
                head = Text(f"  {label:<{label_width}}  ", "cyan")
                for line in wrapped(value, outlet.text_width - indent):
                    outlet.write(head + Text(line))
                    head = Text(" " * indent)

    def step(self, metrics: StepMetrics) -> None:
        """Update the bar. Print a line for the first, the last and every `log_interval`-th step.

        Under the line come the time split and the meters' lines, if any.
        """
        self._since_line.append(metrics)
        if len(self._recent_seconds) == 1 and self._recent_seconds[0] > metrics.step_time_seconds:
            self._recent_seconds.clear()  # the first step also warms up: its time would make the ETA far too long
        self._recent_seconds.append(metrics.step_time_seconds)
        mean_seconds = sum(self._recent_seconds) / len(self._recent_seconds)
        eta_seconds = mean_seconds * (self._num_steps - metrics.step)
        if self._live is not None:
            self._live.show_step(metrics, eta_seconds)
        if has_line(metrics.step, self._log_interval, self._num_steps):
            row = cells(self._since_line, self._num_steps, eta_seconds, self._memory)
            self._since_line.clear()
            for outlet, table in self._outlets:
                for line in table.lines(row, outlet.width):
                    outlet.write(line)
                indent = " " * (table.first_width + 2)
                for below in (metrics.time_split, *(each.line for each in metrics.measured)):
                    for text in wrapped(str(below), outlet.text_width - len(indent)) if below else ():
                        outlet.write(Text(indent + text, "dim"))

    def validation(self, step: int, loss: float, seconds: float) -> None:
        """Print the validation loss after `step` steps, and the `seconds` that the validation took."""
        at = f"{step}/{self._num_steps}"
        self.say(f"{at:>{max(7, len(at))}}  {loss:7.4f}  validation loss, in {duration(seconds)}", "green")

    def phase(self, name: str) -> None:
        """Show the run's phase at the start of the bar."""
        if self._live is not None:
            self._live.show_phase(name)

    def close(self) -> None:
        """Remove the bar."""
        if self._live is not None:
            self._live.close()
