"""Read this node's GPU memory from nvidia-smi: no CUDA context is created, and torch is not imported."""

import subprocess
from collections.abc import Mapping

from triaxis.engine.config.section import Rule
from triaxis.models.predict.fit import Devices, memory_rule

QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
MIB = 2**20
ANSWERS_WITHIN_SECONDS = 30.0


def read_devices(variables: Mapping[str, str]) -> Devices | None:
    """Read the memory of the GPUs that ranks may use; None if nvidia-smi is missing, fails, or gives no number.

    Args:
        variables: environment; CUDA_VISIBLE_DEVICES selects GPUs by number or UUID.
    """
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    chosen = [] if visible is None else ["-i", visible]
    try:
        answer = subprocess.run(
            [*QUERY, *chosen], capture_output=True, text=True, check=True, timeout=ANSWERS_WITHIN_SECONDS
        )
        mebibytes = [int(line) for line in answer.stdout.split("\n") if line.strip()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return Devices(min(mebibytes) * MIB, len(mebibytes)) if mebibytes else None


def memory_rules(variables: Mapping[str, str]) -> list[Rule]:
    """Return the rule that a run's predicted memory fits this node's GPUs; empty if their memory is unknown."""
    devices = read_devices(variables)
    return [] if devices is None else [memory_rule(devices)]
