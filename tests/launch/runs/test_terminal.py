"""Whole runs whose terminal ends, is never read, or hangs up."""

import fcntl
import os
import pty
import subprocess
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.command_line import ROOT, TRIAXIS, environment, events, records, wait_for_steps

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

NUM_STEPS = 60
WORDS = (
    str(ROOT / "configs" / "gpt_tiny.yaml"),
    *("data.synthetic=true", "eval.interval=null", "model.seq_length=16", "runtime.name=shown"),
    *("parallel.tp=1", "parallel.pp=1", "parallel.vpp=1", "parallel.dp=2", "parallel.sequence_parallel=false"),
    *("telemetry.sample_tokens=0", "telemetry.log_interval=1"),
)


def start(folder: Path, stdout: int, *more: str, preexec: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TRIAXIS, "train", *WORDS, *more],
        env=environment(),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stdout,
        text=True,
        start_new_session=True,
        preexec_fn=preexec,
    )


def test_a_run_outlives_the_reader_of_its_output(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    run = start(tmp_path, writing, f"train.steps={NUM_STEPS}")
    os.close(writing)
    metrics = tmp_path / "runs" / "shown" / "metrics.jsonl"
    wait_for_steps(run, metrics, 1)
    os.close(reading)
    assert run.wait(120) == 0
    assert len(records(metrics)) == NUM_STEPS
    (dropped,) = [event for event in events(metrics.parent) if event["kind"] == "output_dropped"]
    assert dropped["message"].startswith("the terminal can no longer be written (Broken pipe)")
    log = (metrics.parent / "logs" / "attempt_00" / "rank_00000.log").read_text()
    assert f"{NUM_STEPS}/{NUM_STEPS}" in log


def test_a_terminal_that_nobody_reads_holds_no_run(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    run = start(tmp_path, slave, f"train.steps={NUM_STEPS}")
    os.close(slave)
    assert run.wait(120) == 0
    os.close(master)
    assert len(records(tmp_path / "runs" / "shown" / "metrics.jsonl")) == NUM_STEPS


def test_a_run_whose_terminal_hangs_up_saves(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    run = start(
        tmp_path,
        slave,
        "train.steps=100000",
        preexec=lambda: fcntl.ioctl(slave, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    metrics = tmp_path / "runs" / "shown" / "metrics.jsonl"
    wait_for_steps(run, metrics, 2)
    os.close(master)
    assert run.wait(120) == 75
    ended = events(metrics.parent)
    assert [event["kind"] for event in ended if event["kind"] in ("checkpoint_saved", "stopped")] == [
        "checkpoint_saved",
        "stopped",
    ]
