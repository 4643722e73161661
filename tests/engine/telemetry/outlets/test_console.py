"""What people see: numbers, columns that fit, plain text in files, a bar on a terminal that nobody's prints tear."""

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triaxis.engine.telemetry.outlets.banner import ladder
from triaxis.engine.telemetry.outlets.console import Live, Report
from triaxis.engine.telemetry.outlets.format import compact, duration, gigabytes, significant
from triaxis.engine.telemetry.outlets.lossy_file import LossyFile, TextLines
from triaxis.engine.telemetry.outlets.table import columns_of, fitting
from triaxis.engine.telemetry.record.metrics import Measured, StepMetrics
from triaxis.engine.telemetry.timing.time_split import PARTS, TimeSplit

MakeMetrics = Callable[..., StepMetrics]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"),
        (0.0057021, "0.00570"),
        (0.06324, "0.0632"),
        (1.2341, "1.234"),
        (989.44, "989.4"),
        (999.99, "1000"),
        (12345.6, "12346"),
        (1.2e6, "1.2e+06"),
        (3e-7, "3.0e-07"),
        (float("inf"), "inf"),
    ],
)
def test_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


def test_counts_memory_and_times_have_units() -> None:
    values = [0, 950.4, 1000, 12_412, 999_949, 1_234_567, 5.7e9, 2e12]
    assert [compact(value) for value in values] == [
        "0", "950", "1,000", "12,412", "999.9k", "1.235M", "5.700G", "2.000T",
    ]  # fmt: skip
    amounts = [0, 21, 16_400_000, 582_100_000, 10**9, 47_123_000_000, 1_234_500_000_000]
    assert [gigabytes(amount) for amount in amounts] == [
        "0.0 GB", "0.0000000210 GB", "0.0164 GB", "0.582 GB", "1.0 GB", "47.1 GB", "1,234.5 GB",
    ]  # fmt: skip
    assert [duration(seconds) for seconds in (0, 9.4, 59.6, 754, 5025, 183_845)] == [
        "0:00", "0:09", "1:00", "12:34", "1:23:45", "2d 03:04",
    ]  # fmt: skip


@given(st.floats(1e-12, 1e12))
def test_numbers_fit_their_columns(value: float) -> None:
    assert len(significant(value)) <= 9
    assert len(compact(value)) <= 6
    if 1e-4 <= value < 1e4:
        assert len(significant(value)) <= 8
        assert float(significant(value)) == pytest.approx(value, rel=6e-3)


@given(st.integers(1, 250), st.integers(1, 10**7), st.booleans())
def test_columns_are_dropped_until_the_line_fits_and_not_one_more(width: int, num_steps: int, show_mfu: bool) -> None:
    columns = columns_of(num_steps, show_mfu=show_mfu, memory="resident")
    kept = fitting(columns, width)
    length = sum(column.width + 2 for column in kept) - 2
    assert [column for column in columns if column in kept] == list(kept)
    dropped = [column for column in columns if column not in kept]
    assert length <= width or all(column.goes_first == 0 for column in kept)
    assert all(column.goes_first > 0 for column in dropped)
    if dropped:
        last = min(dropped, key=lambda column: column.goes_first)
        assert length + last.width + 2 > width


def report(file: TextIO | None, log: TextIO | None = None, *, num_steps: int = 30, show_mfu: bool = False) -> Report:
    return Report(num_steps, 10, terminal=file, log=log, show_mfu=show_mfu)


def test_a_pipe_and_the_log_get_the_same_plain_lines_with_all_columns(make_metrics: MakeMetrics) -> None:
    pipe, log = io.StringIO(), io.StringIO()
    lines = report(pipe, log, show_mfu=True)
    for step in range(1, 31):
        lines.step(make_metrics(step=step, mfu=0.417))
    lines.close()
    assert pipe.getvalue() == log.getvalue()
    header, *rows = pipe.getvalue().splitlines()
    assert header.split() == [
        "step", "loss", "lr", "grad", "tokens/s", "TFLOP/s", "MFU", "resident", "s/step", "ETA",
    ]  # fmt: skip
    assert [row.split()[0] for row in rows] == ["1/30", "10/30", "20/30", "30/30"]
    assert rows[1].split()[1:] == [
        "3.0000", "1.00e-03", "0.500", "64", "0.250", "41.7%", "1.1", "GB", "2.000", "0:40",
    ]  # fmt: skip
    assert all(len(row) == len(header) for row in rows)


def test_a_line_has_its_steps_loss_and_the_mean_speed_since_the_line_before(make_metrics: MakeMetrics) -> None:
    file = io.StringIO()
    lines = report(file)
    lines.step(make_metrics(step=1))
    for step in range(2, 11):
        seconds = 1.0 if step < 10 else 10.0
        lines.step(make_metrics(step=step, loss=step / 2, step_time_seconds=seconds, tokens_per_second=1800 / seconds))
    cells = file.getvalue().splitlines()[-1].split()
    assert cells[0] == "10/30" and cells[1] == "5.0000"
    assert cells[4] == "900", "9 steps of 1800 tokens in 18 seconds"
    assert "2.000" in cells


def test_under_a_line_stands_where_the_time_went(make_metrics: MakeMetrics) -> None:
    file = io.StringIO()
    lines = report(file)
    parts = {**dict.fromkeys(PARTS, 0.0), "compute": 6.0, "bubble": 2.0, "exposed_tp": 1.5, "data": 0.5, "other": 0.01}
    split = TimeSplit(2, 9, (parts, parts), (1.5, 1.5), (6.0, 6.0))
    for step in range(1, 11):
        lines.step(
            make_metrics(
                step=step,
                time_split=split if step == 10 else None,
                measured=[
                    Measured({}, line="loss of tokens ahead 4.0000" * (step == 10)),
                    Measured({}, line="loss scale 8, 2 overflows"),
                ],
            )
        )
    _, first, scale, tenth, below, ahead, scale_again = file.getvalue().splitlines()
    assert ahead == "         loss of tokens ahead 4.0000"
    assert scale == scale_again == "         loss scale 8, 2 overflows"
    assert first.split()[0] == "1/30" and tenth.split()[0] == "10/30"
    assert below == "         compute 60%  tp 15%  bubble 20% (schedule 15%)  data 5%"


def test_the_eta_forgets_a_slow_first_step(make_metrics: MakeMetrics) -> None:
    file = io.StringIO()
    lines = report(file)
    lines.step(make_metrics(step=1, step_time_seconds=100.0))
    for step in range(2, 11):
        lines.step(make_metrics(step=step, step_time_seconds=3.0))
    first, later = file.getvalue().splitlines()[1:]
    assert first.split()[-1] == "48:20"
    assert later.split()[-1] == "1:00"


def test_blocks_keep_their_line_breaks_and_wrap_under_the_label() -> None:
    file = io.StringIO()
    report(file).block("Title", [("a", "one\n  two"), ("label", "word " * 40)])
    lines = file.getvalue().splitlines()
    assert lines[:3] == ["Title", "  a      one", "           two"]
    assert lines[3].startswith("  label  word word") and lines[4].startswith("         word")
    assert all(len(line) <= 120 for line in lines)


def test_the_ladder_puts_the_model_among_the_entropies() -> None:
    lines = ladder(1.9, 2.6, {"uniform": 5.55, "bigram": 2.45, "unigram": 3.31})
    assert [line.split("<-")[0].split()[1] for line in lines] == [
        "uniform", "unigram", "validation", "bigram", "training",
    ]  # fmt: skip
    assert ladder(None, None, {}) == []
    assert "this model" in ladder(1.0, None, {})[0]


@contextmanager
def terminal(columns: int) -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """A terminal of this width, and a function that returns what was written to it."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    os.set_blocking(master, False)
    written = bytearray()

    def read() -> str:
        while True:
            try:
                written.extend(os.read(master, 65536))
            except BlockingIOError:
                return written.decode()

    with os.fdopen(slave, "w", encoding="utf-8") as file:
        yield file, read
    os.close(master)


def visible_lines(text: str) -> list[str]:
    """Without colours and cursor movements; a line that was drawn again counts again."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text))]


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_nothing_is_wider_than_the_terminal(
    columns: int, make_metrics: MakeMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    with terminal(columns) as (file, read):
        lines = report(file, show_mfu=True)
        lines.block("Title", [("label", "some words " * 30)])
        for step in range(1, 12):
            lines.step(make_metrics(step=step, mfu=0.5))
        lines.validation(11, 2.5, 3.0)
        read()
        lines.close()
        shown = visible_lines(read())
    assert max(len(line) for line in shown) <= columns
    header = next(line for line in shown if line.lstrip().startswith("step"))
    assert ("resident" in header) == (columns >= 120) and "ETA" in header
    assert any("11/30" in line and "37%" in line and "━" in line for line in shown)


def test_prints_stand_above_the_bar_and_in_the_log(make_metrics: MakeMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    log = io.StringIO()
    before = sys.stdout, sys.stderr
    with terminal(100) as (file, read):
        lines = report(file, log)
        lines.step(make_metrics(step=1))
        print("somebody", "printed")
        sys.stderr.write("[not markup] and ")
        sys.stderr.write("no newline")
        lines.phase("validation")
        lines.step(make_metrics(step=2))
        lines.close()
        shown = visible_lines(read())
    assert (sys.stdout, sys.stderr) == before
    assert "somebody printed" in shown and "[not markup] and no newline" in shown
    assert log.getvalue().splitlines()[2:] == ["somebody printed", "[not markup] and no newline"]
    assert "\x1b" not in log.getvalue()


def test_a_terminal_that_grew_gets_more_columns_under_a_new_header(
    make_metrics: MakeMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    with terminal(60) as (file, read):
        lines = report(file)
        lines.step(make_metrics(step=1))
        fcntl.ioctl(file.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
        lines.step(make_metrics(step=10))
        lines.close()
        headers = [line.split() for line in visible_lines(read()) if line.lstrip().startswith("step")]
    assert len(headers) == 2 and "resident" not in headers[0] and "resident" in headers[1]


def test_a_terminal_that_has_hung_up_keeps_its_last_width(make_metrics: MakeMetrics) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    lines = report(TextLines(LossyFile(slave)))
    lines.step(make_metrics(step=1))
    os.close(master)
    with pytest.raises(OSError, match="Input/output error"):
        os.get_terminal_size(slave)
    lines.step(make_metrics(step=2))
    lines.close()
    live = Live(TextLines(LossyFile(slave)), None, 30)
    assert live.width == 80, "it has never said its own"
    os.close(slave)
