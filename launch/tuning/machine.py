"""The machine that a layout is chosen for: ranks, nodes and the memory of a rank.

8x80GB     8 GPUs of 80 GB, one node             64x80GB    8 nodes of 8
nothing    the GPUs of this machine, as nvidia-smi lists them; without any, its cores, which share its memory
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from triaxis.engine.errors import ConfigError, counted
from triaxis.engine.layout.rank_rules import MOST_RANKS
from triaxis.engine.telemetry.outlets.format import gigabytes
from triaxis.launch.start.gpu_memory import read_devices
from triaxis.models.predict.rank_memory import GB

GPUS_PER_NODE = 8
"""GPUs of a node where more of them are asked for."""

RESIDENT_BYTES = 6 * 10**8
"""Memory of a rank on a CPU before it holds a tensor: Python, torch and its libraries."""

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The memory that a container may use, or `max`."""

_WRITTEN = re.compile(r"(?P<count>[1-9][0-9]*)x(?P<gigabytes>[0-9]+(\.[0-9]+)?)GB")


@dataclass(frozen=True, slots=True)
class Machine:
    """Ranks that a run may have.

    Attributes:
        num_nodes, ranks_per_node: all nodes are alike.
        memory_bytes: that a rank may use, on its GPU or of the machine's.
        is_gpu: each rank has a GPU of its own.
        name: of the machine, for messages.
    """

    num_nodes: int
    ranks_per_node: int
    memory_bytes: int
    is_gpu: bool
    name: str

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def rank(self) -> str:
        """Return the word for the device of one rank."""
        return "GPU" if self.is_gpu else "core"


def gpus(count: int, memory_bytes: int) -> Machine:
    """Return a machine of GPUs: one node of up to GPUS_PER_NODE, or several full ones."""
    per_node = min(count, GPUS_PER_NODE)
    nodes = f" on {count // per_node:,} nodes of {per_node}" if count > per_node else ""
    name = f"{counted(count, 'GPU')} of {gigabytes(memory_bytes)}{nodes}"
    return Machine(count // per_node, per_node, memory_bytes, True, name)


def written_machine(text: str) -> Machine:
    """Return the machine that is written as `8x80GB`.

    Raises:
        ConfigError: it is written otherwise, has no memory, too many ranks, or a node that is not full.
    """
    written = _WRITTEN.fullmatch(text)
    count, memory_bytes = (0, 0) if written is None else (int(written["count"]), int(float(written["gigabytes"]) * GB))
    if not memory_bytes:
        rule = "must be a number of GPUs and the memory of each, such as 8x80GB; no layout could be chosen"
    elif count > MOST_RANKS:
        rule = f"must be at most {MOST_RANKS:,} GPUs; no run has more ranks"
    elif count > GPUS_PER_NODE and count % GPUS_PER_NODE:
        rule = f"more than {GPUS_PER_NODE} GPUs must be nodes of {GPUS_PER_NODE}; a node would not be full"
    else:
        return gpus(count, memory_bytes)
    raise ConfigError([f"--gpus {text}: {rule}."], "the command line")


def this_machine(variables: Mapping[str, str]) -> Machine:
    """Return the machine that this process runs on.

    Args:
        variables: CUDA_VISIBLE_DEVICES chooses among the GPUs.
    """
    devices = read_devices(variables)
    if devices is not None and devices.count is not None:
        memory_bytes, count = devices.memory_bytes, devices.count
        name = f"{counted(count, 'GPU')} of {gigabytes(memory_bytes)}"
        return Machine(1, count, memory_bytes, True, name)
    cores, memory_bytes = len(os.sched_getaffinity(0)), host_memory_bytes()
    name = f"{counted(cores, 'CPU core')} and {gigabytes(memory_bytes)}, no GPU"
    return Machine(1, cores, max(1, memory_bytes // cores - RESIDENT_BYTES), False, name)


def host_memory_bytes(limit: Path = CGROUP_LIMIT) -> int:
    """Return the memory that this machine has, or that its container may use."""
    total = int(psutil.virtual_memory().total)
    text = limit.read_text().strip() if limit.is_file() else "max"
    return total if text == "max" else min(total, int(text))
