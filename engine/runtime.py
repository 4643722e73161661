"""Start and stop of one rank: device, backend, threads, the default process group.

`RankEnvironment` is what a launcher (torchrun, srun) says in environment variables. `start` turns it into a `Runtime`;
`Runtime.close` undoes it. Nothing here is remembered in module variables.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.config import RuntimeConfig
from engine.errors import TopologyError


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """Who this process is among those that were started together."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    restart_count: int = 0

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> "RankEnvironment":
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; a lone process needs none.

        Raises:
            TopologyError: some of them are set and others are missing or not numbers.
        """
        if "WORLD_SIZE" not in variables and "RANK" not in variables:
            return cls()
        try:
            return cls(
                rank=int(variables["RANK"]),
                world_size=int(variables["WORLD_SIZE"]),
                local_rank=int(variables.get("LOCAL_RANK", variables["RANK"])),
                local_world_size=int(variables.get("LOCAL_WORLD_SIZE", variables["WORLD_SIZE"])),
                master_addr=variables.get("MASTER_ADDR", "127.0.0.1"),
                master_port=int(variables["MASTER_PORT"]),
                restart_count=int(variables.get("TORCHELASTIC_RESTART_COUNT", "0")),
            )
        except (KeyError, ValueError) as error:
            raise TopologyError(
                f"the launcher's variables are incomplete: {error} of RANK, WORLD_SIZE, MASTER_PORT. A rank that does not "
                f"know its place cannot join a group. Start through launch/pretrain_gpt.sh, torchrun or srun."
            ) from error


@dataclass(frozen=True, slots=True)
class Runtime:
    """One running rank."""

    environment: RankEnvironment
    device: torch.device

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def choose_device(device: str, local_rank: int) -> torch.device:
    """`auto`: this rank's GPU where there are GPUs, else the CPU.

    Raises:
        TopologyError: CUDA was asked for and is not there, or there are fewer GPUs than local ranks.
    """
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TopologyError(
            "runtime.device = cuda, but torch finds no CUDA device; every rank would stop at its first tensor. "
            "Use runtime.device=auto or cpu, or install a CUDA build of torch."
        )
    if local_rank >= torch.cuda.device_count():
        raise TopologyError(
            f"local rank {local_rank} has no GPU: this node shows {torch.cuda.device_count()}. Two ranks on one GPU would "
            f"deadlock in NCCL. Start at most {torch.cuda.device_count()} ranks per node, or set runtime.device=cpu."
        )
    return torch.device("cuda", local_rank)


def start(environment: RankEnvironment, config: RuntimeConfig) -> Runtime:
    """Choose the device and join the default process group (gloo on the CPU, NCCL on GPUs).

    The store's keys carry the restart count, so that a restarted group never reads a dead one's addresses.
    """
    device = choose_device(config.device, environment.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if environment.world_size > 1:
        assert environment.master_port is not None, "a group of several ranks has an address"
        timeout = timedelta(seconds=config.timeout_seconds)
        hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = dist.TCPStore(
            environment.master_addr,
            environment.master_port,
            is_master=environment.rank == 0 and not hosted_by_launcher,
            multi_tenant=True,
            timeout=timeout,
        )
        # No `device_id`: with it, torch makes every later group by splitting the default communicator, which needs all ranks
        # to take part, and the topology's groups are made by their members alone.
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"attempt/{environment.restart_count}", store),
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timeout,
        )
    return Runtime(environment, device)
