"""Chooses a rank's device and backend, and checks that all ranks' choices are compatible.

`place` follows the launcher's decision (`triaxis.engine.device.gpus`) or raises an error. `judge_places` runs on rank 0 before any
group is created, so one bad rank stops all ranks with one error.
"""

import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from triaxis.engine.comm.store_agreement import Facts, grouped, name_ranks
from triaxis.engine.config.schema.run import RuntimeConfig
from triaxis.engine.device.gpus import (
    BACKEND_VARIABLE,
    CPU,
    CUDA,
    DEVICE_VARIABLE,
    GLOO,
    NCCL,
    Gpus,
    backend_of,
    device_type,
    find_gpus,
)
from triaxis.engine.errors import TopologyError


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's device, and the torch.distributed backend of its process groups, `gloo` or `nccl`."""

    device: torch.device
    backend: str


def place(config: RuntimeConfig, local_rank: int, variables: Mapping[str, str]) -> Place:
    """Choose this rank's device and backend.

    The launcher's decision is followed. If our launcher did not start this rank, the rank decides by the same rules.

    Args:
        config: the config's `runtime` section.
        local_rank: index of this rank on its node.
        variables: environment variables, through which the launcher states its decision.

    Raises:
        TopologyError: this rank cannot have the device or the backend, or the launcher's variables contradict the config.
    """
    device, backend = variables.get(DEVICE_VARIABLE), variables.get(BACKEND_VARIABLE)
    if device and backend:
        _refuse_contradiction(config, device, backend)
    if config.device == CPU or device == CPU:
        return Place(torch.device(CPU), backend_of(config, CPU, "the ranks are on the CPU"))
    gpus = find_gpus(variables, ask_torch=True)
    if not device or not backend:
        device = device_type(config, gpus)
        backend = backend_of(config, device, gpus.note)
        if device == CPU:
            return Place(torch.device(CPU), backend)
    if not gpus.count:
        raise TopologyError(gpus.problem or _lost_gpus(gpus))
    return Place(_gpu_of(local_rank, gpus.count, backend), backend)


def _refuse_contradiction(config: RuntimeConfig, device: str, backend: str) -> None:
    is_known = device in (CPU, CUDA) and backend in (GLOO, NCCL)
    if is_known and config.device in ("auto", device) and config.collectives in ("auto", backend):
        return
    raise TopologyError(
        f"{DEVICE_VARIABLE}={device} {BACKEND_VARIABLE}={backend} contradict runtime.device = {config.device} and "
        f"runtime.collectives = {config.collectives}: the launcher sets these variables for its ranks, and they would not do "
        f"what the config says. Unset them, and set the config's fields."
    )


def _lost_gpus(gpus: Gpus) -> str:
    return (
        f"{socket.gethostname()}: {gpus.note or 'this rank sees no GPU'}, and the launcher decided on {CUDA}. The rank would train "
        f"on the CPU and others on GPUs. Give all ranks the same view of the GPUs, or set runtime.device=cpu."
    )


def _gpu_of(local_rank: int, num_gpus: int, backend: str) -> torch.device:
    """Choose the GPU with the index `local_rank`, modulo the number of visible GPUs.

    With gloo, several ranks can thus share a GPU. With NCCL, a rank may take GPU 0 for any index if it sees a single GPU. SLURM
    shows each task its own GPU with --gpus-per-task=1.

    Raises:
        TopologyError: the backend is NCCL, and the rank sees several GPUs but none with its index.
    """
    if backend == NCCL and local_rank >= num_gpus > 1:
        raise TopologyError(
            f"local rank {local_rank} has no GPU: this node shows {num_gpus}. NCCL refuses two ranks on one GPU. Start at most "
            f"{num_gpus} ranks per node, set runtime.device=cpu, or, to try a layout slowly, runtime.collectives=gloo."
        )
    return torch.device(CUDA, local_rank % num_gpus)


def facts_of(where: Place) -> Facts:
    """Collect the facts that `judge_places` compares. These are host, device type, backend and, with NCCL, the GPU's UUID."""
    facts: Facts = {"host": socket.gethostname(), "device": where.device.type, "backend": where.backend}
    if where.backend == NCCL:
        facts["uuid"] = str(torch.cuda.get_device_properties(where.device).uuid)
    return facts


def judge_places(every: Sequence[Facts]) -> str | None:
    """Describe why the ranks' devices or backends are incompatible, or return None.

    Args:
        every: each rank's `facts_of`, in rank order. A rank without a `Place` gives `host` and `problem` instead.
    """
    failed = {rank: str(facts["problem"]) for rank, facts in enumerate(every) if "problem" in facts}
    if failed:
        texts = dict.fromkeys(failed.values())
        return "\n".join(f"{name_ranks(rank for rank in failed if failed[rank] == text)}: {text}" for text in texts)
    kinds = grouped(every, lambda facts: f"{facts['device']} with {facts['backend']}")
    if len(kinds) > 1:
        lines = [f"  {kind}: {name_ranks(ranks)} ({_hosts(every, ranks)})" for kind, ranks in kinds.items()]
        return "\n".join(
            (
                "ranks are on different kinds of device, and the first call between them would never return:",
                *lines,
                "Start all of them where torch finds a GPU, or set runtime.device=cpu.",
            )
        )
    with_gpu = grouped(every, lambda facts: str(facts.get("uuid", "")))
    shared = {uuid: ranks for uuid, ranks in with_gpu.items() if uuid and len(ranks) > 1}
    for uuid, ranks in shared.items():
        return (
            f"{name_ranks(ranks)} on {_hosts(every, ranks)} have one GPU ({uuid}) between them. NCCL refuses two ranks on one GPU. "
            f"Start one rank per GPU, show each task its own (srun --gpus-per-task=1), set runtime.device=cpu, or, to try a "
            f"layout slowly, runtime.collectives=gloo."
        )
    return None


def _hosts(every: Sequence[Facts], ranks: Iterable[int]) -> str:
    return ", ".join(dict.fromkeys(str(every[rank]["host"]) for rank in ranks))
