"""A training run as a person starts it: words and variables in a folder; what was said, what was left behind."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.offered import require_readable
from triaxis.engine.telemetry.record.events import read_events

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = ("bash", str(ROOT / "launch" / "pretrain_gpt.sh"))
TRIAXIS = (sys.executable, "-m", "triaxis.launch.cli")

OTHER_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "TRIAXIS_", "NNODES", "NODE_RANK", "NPROC_", "MASTER_", "WORLD_SIZE")
OTHER_RUNS = (
    *("TP", "CP", "PP", "VPP", "DP", "EP", "ETP", "MICRO_BATCH_SIZE", "GLOBAL_BATCH_SIZE", "RUN_NAME", "RANK"),
    *("PYTHONPATH", "PYTHONSAFEPATH"),
)


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    exit_code: int
    out: str
    err: str


def environment() -> dict[str, str]:
    """Return this process's variables without those of other launchers and runs, for a run on CPUs."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(OTHER_LAUNCHERS) and name not in OTHER_RUNS
    }
    return kept | {
        "TRIAXIS_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


@contextmanager
def started(folder: Path, *command: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """The command, running in `folder` on CPUs; it does not outlive the block."""
    process = subprocess.Popen(
        command, env=environment() | variables, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()  # ranks end with their launcher
        process.wait()


def ended(process: subprocess.Popen[str], within_seconds: float) -> Ended:
    """What it said, once it has ended; `subprocess.TimeoutExpired` if that takes longer. Its offers must be readable."""
    out, err = process.communicate(timeout=within_seconds)
    require_readable(out + err)
    return Ended(process.returncode, out, err)


def run(folder: Path, *command: str, within_seconds: float = 240.0, **variables: str) -> Ended:
    """`started` and `ended`."""
    with started(folder, *command, **variables) as process:
        return ended(process, within_seconds)


def events(run: Path) -> list[dict[str, Any]]:
    """The records of a run directory's events, of all nodes; every line holds one."""
    read = read_events(run)
    assert read.num_unreadable == 0
    return [event.to_record() for event in read.events]


def records(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file; every line must be whole."""
    text = path.read_text()
    assert not text or text.endswith("\n"), f"{path} ends in half a line: {text[-80:]!r}"
    return [json.loads(line) for line in text.splitlines()]


def wait_for_steps(
    process: subprocess.Popen[str], metrics: Path, num_steps: int, within_seconds: float = 120.0
) -> None:
    """Return as soon as `metrics` has so many lines."""
    deadline_seconds = time.monotonic() + within_seconds
    while not metrics.exists() or metrics.read_text().count("\n") < num_steps:
        assert process.poll() is None, f"it ended: {process.communicate()}"
        assert time.monotonic() < deadline_seconds, f"not {num_steps} steps in {within_seconds} seconds"
        time.sleep(0.1)


def ranks_of(launcher: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The live ranks that a launcher started, by rank."""
    below = psutil.Process(launcher.pid).children(recursive=True)
    return {int(process.environ()["RANK"]): process for process in below if "RANK" in process.environ()}


def wait_until_gone(processes: list[psutil.Process], within_seconds: float) -> list[psutil.Process]:
    """Those that are still alive after so long. A zombie is gone: nobody may be there to collect it in a container."""
    deadline_seconds = time.monotonic() + within_seconds
    while (alive := [process for process in processes if _is_alive(process)]) and time.monotonic() < deadline_seconds:
        time.sleep(0.1)
    return alive


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
