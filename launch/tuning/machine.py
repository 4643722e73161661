"""Describe the machine that a layout is chosen for.

A user writes the machine as follows:

    8x80GB     one node with 8 GPUs of 80 GB
    64x80GB    8 nodes with 8 such GPUs each
    nothing    this machine, with one rank per GPU, or one rank per core if there are no GPUs
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from triaxis.engine.device.host_memory import host_memory_bytes
from triaxis.engine.errors import ConfigError, counted
from triaxis.engine.layout.rank_rules import MOST_RANKS
from triaxis.engine.telemetry.outlets.format import gigabytes
from triaxis.launch.start.gpu_memory import read_devices
from triaxis.models.predict.rank_memory import GB

GPUS_PER_NODE = 8
"""GPUs per node if more GPUs than this are requested."""

RESIDENT_BYTES = 6 * 10**8
"""Memory that a rank on a CPU uses before it holds a tensor: Python, torch and its libraries."""

_WRITTEN = re.compile(r"(?P<count>[1-9][0-9]*)x(?P<gigabytes>[0-9]+(\.[0-9]+)?)GB")


@dataclass(frozen=True, slots=True)
class Machine:
    """The ranks that a run may have.

    Attributes:
        num_nodes, ranks_per_node: numbers of nodes, and of ranks on each node.
        memory_bytes: memory that a rank may use, on its GPU or as its share of the host's memory.
        is_gpu: whether each rank has a GPU of its own.
        name: machine name, for messages.
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
        """Return what messages call the device of one rank, a GPU or a core."""
        return "GPU" if self.is_gpu else "core"


def gpus(count: int, memory_bytes: int) -> Machine:
    """Build a machine with `count` GPUs.

    The machine has one node if `count` is at most GPUS_PER_NODE, else nodes of GPUS_PER_NODE each.
    """
    per_node = min(count, GPUS_PER_NODE)
    nodes = f" on {count // per_node:,} nodes of {per_node}" if count > per_node else ""
    name = f"{counted(count, 'GPU')} of {gigabytes(memory_bytes)}{nodes}"
    return Machine(count // per_node, per_node, memory_bytes, True, name)


def written_machine(text: str) -> Machine:
    """Parse a machine written as `8x80GB`.

    Raises:
        ConfigError: the text has another form, the memory is zero, there are more GPUs than a run may have ranks, or more than
            GPUS_PER_NODE GPUs do not fill whole nodes.
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
    """Describe the machine that this process runs on.

    Args:
        variables: environment; CUDA_VISIBLE_DEVICES selects GPUs.
    """
    devices = read_devices(variables)
    if devices is not None and devices.count is not None:
        memory_bytes, count = devices.memory_bytes, devices.count
        name = f"{counted(count, 'GPU')} of {gigabytes(memory_bytes)}"
        return Machine(1, count, memory_bytes, True, name)
    cores, memory_bytes = len(os.sched_getaffinity(0)), host_memory_bytes()
    name = f"{counted(cores, 'CPU core')} and {gigabytes(memory_bytes)}, no GPU"
    return Machine(1, cores, max(1, memory_bytes // cores - RESIDENT_BYTES), False, name)
