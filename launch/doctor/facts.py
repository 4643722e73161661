"""Collect the facts that one rank can find out by itself about its node."""

import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from triaxis.engine.comm.network import GLOO_VARIABLE
from triaxis.launch.doctor import gpu_map
from triaxis.launch.doctor.compiler import read_compiler
from triaxis.launch.doctor.limits import read_limits
from triaxis.launch.doctor.packages import read_packages
from triaxis.launch.doctor.records import NetworkFacts, RankFacts

VARIABLES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "OMP_NUM_THREADS")
NODES_OWN = ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")
"""Variables that may differ between nodes, because each node has its own names for GPUs and interfaces."""


def collect(
    rank: int,
    node: int,
    device: torch.device,
    *,
    dtype: torch.dtype,
    data_files: Iterable[Path],
    first_of_node: bool,
) -> RankFacts:
    """Collect this rank's facts, except those that need other ranks (folders, clock).

    Args:
        rank, node: index of this rank and index of its node in the layout.
        data_files: files of all corpora.
        first_of_node: whether this rank calls nvidia-smi for the whole node.
    """
    equal = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device.type,
    }
    alike = {
        "kernel": platform.release(),
        "processors": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
    }
    alike |= {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(VARIABLES) and name not in NODES_OWN
    }
    packages = read_packages(device, dtype)
    alike |= {package.name: str(package) for package in packages if package.name != "torch"}
    facts = RankFacts(
        rank=rank,
        node=node,
        host=socket.gethostname(),
        equal=equal,
        alike=alike,
        network=network(),
        corpora={str(path): path.stat().st_size if path.exists() else None for path in data_files},
        limits=read_limits(),
        packages=packages,
        compiler=read_compiler(),
    )
    return _with_gpu(facts, device, first_of_node=first_of_node) if device.type == "cuda" else facts


def network() -> NetworkFacts:
    """Read the cluster's interface, and where this process and its launcher listen. Call it after process groups exist."""
    name = os.environ.get(GLOO_VARIABLE, "")
    states = {one: state for one, state in psutil.net_if_stats().items() if state.isup}
    addresses = [
        one.address for one in psutil.net_if_addrs().get(name, []) if one.family in (socket.AF_INET, socket.AF_INET6)
    ]
    fastest = max(states, key=lambda one: (states[one].speed, one == name, one), default="")
    return NetworkFacts(
        interface=name,
        address=addresses[0] if addresses else "",
        mbits=states[name].speed if name in states else 0,
        fastest=(fastest, states[fastest].speed if fastest else 0),
        # The interface counts once, whichever address is used.
        listening=tuple(sorted({addresses[0] if one in addresses else one for one in _listening()})),
    )


def _listening() -> set[str]:
    processes = [psutil.Process()]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        processes += psutil.Process().parents()[:1]
    found = set()
    for process in processes:
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.Error:
            continue  # a launcher that belongs to another user: its ports are not ours
        found |= {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}
    return found


def _with_gpu(facts: RankFacts, device: torch.device, *, first_of_node: bool) -> RankFacts:
    properties = torch.cuda.get_device_properties(device)
    count = torch.cuda.device_count()
    others = [other for other in range(count) if other != device.index]
    reachable = [other for other in others if torch.cuda.can_device_access_peer(device.index, other)]
    equal = dict(facts.equal) | {
        "CUDA": str(torch.version.cuda),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "GPU": properties.name,
        "GPU memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "driver": driver(),
    }
    matrix, uuid = _nvidia_smi() if first_of_node else ({}, {})
    if first_of_node:
        equal["GPU links"] = gpu_map.summary(matrix)
    return replace(
        facts,
        equal=equal,
        gpu=_uuid(device.index),
        peers=tuple(_uuid(other) for other in reachable),
        links=gpu_map.by_uuid(matrix, uuid),
    )


def driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Read the version of NVIDIA's kernel driver; "unknown" if the file is missing or names none."""
    if not path.exists():
        return "unknown"
    words = path.read_text().partition("\n")[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-")


def _nvidia_smi() -> tuple[dict[int, dict[int, str]], dict[int, str]]:
    if shutil.which("nvidia-smi") is None:
        return {}, {}
    texts = [
        subprocess.run(list(words), capture_output=True, text=True, check=False).stdout
        for words in (gpu_map.TOPOLOGY, gpu_map.QUERY)
    ]
    return gpu_map.links(texts[0]), gpu_map.uuids(texts[1])
