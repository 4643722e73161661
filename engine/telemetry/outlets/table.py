"""Formats the step table, with the columns that fit on the terminal.

        step     loss        lr    grad  tokens/s  TFLOP/s    resident   s/step       ETA
     100/300   2.5123  2.41e-03   0.874    12,520   0.0632    0.582 GB    0.327      1:05

Loss, learning rate and gradient norm belong to the line's step. Speeds and times are means over the steps since the previous line.
TFLOP/s are model FLOPs per device and second, as in MFU. Memory is the logging rank's peak. On a GPU tensors count
(`GPU memory`), on the CPU the whole process (`resident`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from triaxis.engine.telemetry.outlets.format import compact, duration, gigabytes, significant
from triaxis.engine.telemetry.record.metrics import StepMetrics

LINES_PER_HEADER = 20
_GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the step table. A narrow terminal drops columns with high `goes_first` first, and never those with 0."""

    head: str
    width: int
    goes_first: int = 0
    style: str = ""


MEMORY = {"cuda": "GPU memory", "cpu": "resident"}
"""Headings for a process's memory, by device type: memory allocated by torch, or resident memory."""


def columns_of(num_steps: int, *, show_mfu: bool, memory: str) -> tuple[Column, ...]:
    """List all columns for a run.

    Args:
        num_steps: number of steps in the run.
        show_mfu: whether to include the MFU column, which needs the device's peak rate.
        memory: heading of the memory column, from `MEMORY`.
    """
    columns = (
        Column("step", max(7, 2 * len(str(num_steps)) + 1)),
        Column("loss", 7, style="bold"),
        Column("lr", 8, 3),
        Column("grad", 6, 2),
        Column("tokens/s", 8),
        Column("TFLOP/s", 7, 4),
        Column("MFU", 6, 1),
        Column(memory, 10, 5),
        Column("s/step", 7),
        Column("ETA", 8),
    )
    return tuple(column for column in columns if show_mfu or column.head != "MFU")


def fitting(columns: Sequence[Column], width: int) -> tuple[Column, ...]:
    """Keep the columns that fit into `width` characters, in order. Those with `goes_first` 0 always stay."""
    kept = list(columns)
    while sum(column.width + len(_GAP) for column in kept) - len(_GAP) > width:
        dispensable = max(kept, key=lambda column: column.goes_first)
        if dispensable.goes_first == 0:
            break
        kept.remove(dispensable)
    return tuple(kept)


def cells(steps: Sequence[StepMetrics], num_steps: int, eta_seconds: float, memory: str) -> dict[str, str]:
    """Format the last step's cell texts, by column heading. `steps`: all since the previous line, to average rates."""
    last = steps[-1]
    seconds = sum(step.step_time_seconds for step in steps)

    def mean(values: Sequence[float]) -> float:
        """Average `values`, one for each of `steps`, with the steps' times as weights."""
        return sum(value * step.step_time_seconds for value, step in zip(values, steps, strict=True)) / seconds

    mfus = [step.mfu for step in steps if step.mfu is not None]
    return {
        "step": f"{last.step}/{num_steps}",
        "loss": f"{last.loss:.4f}",
        "lr": f"{last.lr:.2e}",
        "grad": significant(last.grad_norm),
        "tokens/s": compact(mean([step.tokens_per_second for step in steps])),
        "TFLOP/s": significant(mean([step.model_tflops_per_device for step in steps])),
        "MFU": f"{mean(mfus):.1%}" if len(mfus) == len(steps) else "",
        memory: gigabytes(last.peak_memory_bytes),
        "s/step": significant(seconds / len(steps)),
        "ETA": duration(eta_seconds),
    }


class Table:
    """Formats the table's lines for one outlet. A header is due every `LINES_PER_HEADER` lines and when columns change."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.first_width = columns[0].width
        self._columns = columns
        self._shown: tuple[Column, ...] = ()
        self._num_lines = 0

    def lines(self, row: Mapping[str, str], width: int) -> list[Text]:
        """Format `row` as a line, with the header above it when due."""
        columns = fitting(self._columns, width)
        lines = []
        if columns != self._shown or self._num_lines % LINES_PER_HEADER == 0:
            self._shown, self._num_lines = columns, 0
            lines.append(Text(_GAP.join(f"{column.head:>{column.width}}" for column in columns), "dim"))
        self._num_lines += 1
        lines.append(Text(_GAP).join(Text(f"{row[column.head]:>{column.width}}", column.style) for column in columns))
        return lines
