"""Lines of results: what a benchmark measured, where, when and by which command, appended to a file of JSON lines."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def append_record(
    path: Path, module: str, argv: Sequence[str], numbers: Mapping[str, Any], launcher: str = "python"
) -> None:
    """Append one line to a file, which is made with its folder where it does not exist.

    Args:
        path: of the file.
        module: the benchmark's, behind `benchmarks.`.
        argv: the arguments of its command.
        numbers: what was measured, as JSON takes it; a `machine` among them replaces that of `machine()`.
        launcher: the words before `-m` in the command.
    """
    record = {
        "time": now(),
        "command": " ".join([f"{launcher} -m benchmarks.{module}", *argv]),
        "machine": machine(),
        **numbers,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lines:
        lines.write(json.dumps(record) + "\n")


def now() -> str:
    """Return the time in UTC, to the second (ISO 8601)."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def machine() -> dict[str, Any]:
    """Describe the machine, so that a reader can judge the numbers."""
    return {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def processor_name() -> str:
    """Return the model of the first core where the system names it, else the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return names[0].split(":", 1)[1].strip() if names else platform.machine()
