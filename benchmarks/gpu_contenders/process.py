"""One process: the ceiling, a contender's run, the ceiling again, one row.

    python -m benchmarks.gpu_contenders.process JOB RESULTS        JOB: `records.Job` as JSON

Whatever goes wrong becomes a row too, with its reason; but out of memory where a smaller microbatch is still to be tried only
ends the process, with the exit code DID_NOT_FIT.
"""

import gc
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_contenders.ceiling import fp8_ceiling, matmul_ceiling, synchronize
from benchmarks.gpu_contenders.contenders import CONTENDERS
from benchmarks.gpu_contenders.records import (
    COMMAND_VARIABLE,
    COMMIT_VARIABLE,
    DID_NOT_FIT,
    NO_DEVICE,
    Job,
    append,
    failed,
    measured,
)
from benchmarks.records import now, processor_name
from triaxis.engine.numerics.precision import DTYPES
from triaxis.launch.rank.memory_errors import exhausted
from triaxis.launch.start.process.ending import run_rank
from triaxis.launch.start.process.parent_death import end_with_parent

PACKAGES = (
    "triton",
    "transformers",
    "megatron-core",
    "transformer-engine",
    "torchtitan",
    "torchao",
    "nvidia-cudnn-cu13",
    "numpy",
)


def measure(job: Job) -> dict[str, Any]:
    """Measure a job in this process and return its row.

    Raises:
        Exception: whatever stops the contender.
    """
    device, dtype = torch.device(job.device), DTYPES[job.dtype]
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    started = time.perf_counter()
    contender = CONTENDERS[job.contender]
    products = {"gemm": matmul_ceiling} | ({"fp8": fp8_ceiling} if contender.has_fp8 else {})
    ceilings: dict[str, dict[str, float]] = {name: {} for name in products}

    def measure_ceilings(moment: str) -> None:
        for name, product in products.items():
            ceilings[name][moment] = product(job.ceiling_size, dtype, device, job.ceiling_seconds)
            forget(device)

    measure_ceilings("before")
    with tempfile.TemporaryDirectory() as folder:
        run = contender.run(job, Path(folder))
    synchronize(device)
    forget(device)
    measure_ceilings("after")
    seconds = {"process_seconds": time.perf_counter() - started}
    return measured(job, run, ceilings["gemm"], about() | seconds, fp8_ceilings=ceilings.get("fp8"))


def forget(device: torch.device) -> None:
    """Free cached memory, and reset the peak."""
    if "torch._dynamo" in sys.modules:  # asked for without need it would be imported, for seconds
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def about() -> dict[str, Any]:
    """Describe time, place and versions."""
    return {
        "time": now(),
        "command": os.environ.get(COMMAND_VARIABLE) or shlex.join(sys.orig_argv),
        "commit": os.environ.get(COMMIT_VARIABLE) or None,
        "machine": machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__} | installed(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("PYTORCH_", "NCCL_"))},
    }


def machine() -> dict[str, Any]:
    """Describe the processor and the GPU, and the GPU's present state."""
    known: dict[str, Any] = {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        known |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "gpu_state": gpu_state(),
        }
    return known


def gpu_state() -> str | None:
    """Return driver, clock, temperature and power limit from nvidia-smi; None without it."""
    query = "driver_version,clocks.sm,temperature.gpu,power.draw,power.limit"
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{query}: {said.stdout.strip()}"


def installed() -> dict[str, str]:
    """Return the versions of the contenders' packages."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main(argv: Sequence[str]) -> int:
    end_with_parent()
    job, results = Job.from_json(argv[0]), Path(argv[1])
    if job.device == "cuda" and not torch.cuda.is_available():
        return NO_DEVICE
    try:
        row = measure(job)
    except Exception as error:
        traceback.print_exc()
        if exhausted(error) is not None:  # a smaller microbatch may help
            if not job.is_last_try:
                return DID_NOT_FIT
            job = replace(job, tried=(*job.tried, job.micro_batch_size))
        reason = str(error).strip() or traceback.format_exc().splitlines()[-1]
        row = failed(job, f"{type(error).__name__}: {reason}", about())
    append(results, row)
    return 0


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
