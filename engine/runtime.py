"""Start and stop of one rank: device, allocator, backend, threads, the default process group.

`RankEnvironment` is what a launcher (torchrun, srun) says in environment variables. `start` turns it into a `Runtime`;
`Runtime.close` undoes it. Nothing here is remembered in module variables.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

from engine.config import RuntimeConfig
from engine.errors import TopologyError
from engine.interfaces import Interface, cluster_interface, interface_variables, listening_socket

FLIGHT_RECORDER_VARIABLES = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
"""How many calls NCCL's flight recorder keeps: the name up to torch 2.9, and the one after it."""
FLIGHT_RECORDER_CALLS = "2000"

_FLIGHT_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions of torch that write down what it has kept; builds without NCCL have the second alone."""


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


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""With which a user sets up torch's allocator: the name of today, those of before. Each version of torch reads some of them."""


def choose_device(config: RuntimeConfig, local_rank: int) -> torch.device:
    """`auto`: this rank's GPU where there are GPUs, else the CPU. With `collectives: gloo`, ranks take the GPUs in turns.

    Raises:
        TopologyError: CUDA or NCCL was asked for and is not there, or there are fewer GPUs than local ranks.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cpu" or (config.device == "auto" and not num_gpus):
        if config.collectives == "nccl":
            raise TopologyError(
                "runtime.collectives = nccl, but this rank is on the CPU, whose tensors NCCL cannot move: the first call would "
                "fail. Use runtime.collectives=auto, or start where torch finds a GPU."
            )
        return torch.device("cpu")
    if not num_gpus:
        raise TopologyError(
            "runtime.device = cuda, but torch finds no CUDA device; every rank would stop at its first tensor. "
            "Use runtime.device=auto or cpu, or install a CUDA build of torch."
        )
    if local_rank >= num_gpus and config.collectives != "gloo":
        raise TopologyError(
            f"local rank {local_rank} has no GPU: this node shows {num_gpus}. NCCL refuses two ranks on one GPU. Start at most "
            f"{num_gpus} ranks per node, set runtime.device=cpu, or, to try a layout slowly, runtime.collectives=gloo."
        )
    return torch.device("cuda", local_rank % num_gpus)


def set_up_allocator(
    config: RuntimeConfig, variables: Mapping[str, str], apply: Callable[[str], None] | None = None
) -> None:
    """Let CUDA's segments grow, unless the user's environment says how memory is had.

    It has to be done before the first tensor. It is not done by a variable: torch reads those while it is imported, which has
    happened where torchrun starts a rank, and 2.9 ignores the newer name for this option.

    Args:
        config: of the run.
        variables: the environment.
        apply: hands settings to the allocator; None: torch's own.
    """
    if config.expandable_segments and not any(variables.get(name) for name in ALLOCATOR_VARIABLES):
        (apply or _to_the_allocator)("expandable_segments:True")


def _to_the_allocator(settings: str) -> None:
    with warnings.catch_warnings():
        # Newer versions say that there is a newer name; this one does in each version what it has to.
        warnings.simplefilter("ignore", FutureWarning)
        torch.cuda.memory._set_allocator_settings(settings)


def allocator_retries(device: torch.device) -> int:
    """Return how often torch's allocator has had to free its cache and ask the device again; 0 on the CPU, which has none."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def open_store(interface: Interface, port: int, timeout: timedelta, *, is_server: bool) -> dist.TCPStore:
    """The store where ranks or launchers meet.

    Args:
        interface: of this node, to the others.
        port: of the store; for the server, 0 is a free one (`store.port` tells which).
        timeout: of its answers.
        is_server: this process has the store, and listens at the interface's address only.

    Raises:
        PortTakenError: somebody else listens there.
    """
    if not is_server:
        return dist.TCPStore(interface.store_host, port, is_master=False, multi_tenant=True, timeout=timeout)
    listener = listening_socket(interface, port)
    # The store closes it, and connects to itself as well: at the address where it listens.
    port, descriptor = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(
        interface.address, port, is_master=True, multi_tenant=True, timeout=timeout, master_listen_fd=descriptor
    )


def write_flight_record(path: Path) -> None:
    """NCCL's last calls on this rank as JSON, where this process talks over NCCL and its torch keeps them."""
    if not dist.is_initialized() or dist.get_backend() != "nccl":
        return
    dump = next((getattr(_c10d, name) for name in _FLIGHT_RECORDERS if hasattr(_c10d, name)), None)
    with suppress(RuntimeError, OSError):
        if dump is not None:
            path.write_bytes(dump())


def start(environment: RankEnvironment, config: RuntimeConfig) -> Runtime:
    """Choose the device and join the default process group (gloo on the CPU, NCCL on GPUs, or what `collectives` says).

    The store's keys carry the restart count, so that a restarted group never reads a dead one's addresses. Rank 0's store, and
    the sockets of gloo and NCCL, listen on the interface that leads to MASTER_ADDR (`engine.interfaces`); the store of a torchrun
    that was started by hand is torch's and listens on all of them.
    """
    device = choose_device(config, environment.local_rank)
    if device.type == "cuda":
        set_up_allocator(config, os.environ)
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
        interface = cluster_interface(
            environment.master_addr,
            several_nodes=environment.world_size > environment.local_world_size,
            variables=os.environ,
        )
        os.environ.update(interface_variables(interface, os.environ))
        is_server = environment.rank == 0 and not hosted_by_launcher
        store = open_store(interface, environment.master_port, timeout, is_server=is_server)
        is_nccl = device.type == "cuda" and config.collectives != "gloo"
        if is_nccl:
            for name in FLIGHT_RECORDER_VARIABLES:
                os.environ.setdefault(name, FLIGHT_RECORDER_CALLS)
        # No `device_id`: with it, torch makes every later group by splitting the default communicator, which needs all ranks
        # to take part, and the topology's groups are made by their members alone.
        dist.init_process_group(
            "nccl" if is_nccl else "gloo",
            store=dist.PrefixStore(f"attempt/{environment.restart_count}", store),
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timeout,
        )
    return Runtime(environment, device)
