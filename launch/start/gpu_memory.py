"""Read this node's GPU memory from nvidia-smi, without a CUDA context or torch."""

import subprocess
from collections.abc import Mapping

from triaxis.engine.config.rules.problem import Rule
from triaxis.engine.device.host_memory import host_memory_bytes
from triaxis.models.predict.fit import Devices, host_rule, memory_rule

QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
MIB = 2**20
ANSWERS_WITHIN_SECONDS = 30.0


def read_devices(variables: Mapping[str, str]) -> Devices | None:
    """Read how many GPUs ranks may use, and the smallest one's memory; None if nvidia-smi gives no number.

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
    """Return rules that refuse more predicted memory than this node has, or than its GPUs have if that is known."""
    devices = read_devices(variables)
    return [host_rule(host_memory_bytes()), *([] if devices is None else [memory_rule(devices)])]
