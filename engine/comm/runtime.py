"""Starts and stops one rank's device, allocator and default process group.

`RankEnvironment` holds a launcher's environment variables (torchrun, srun). `start` turns it into a `Runtime`; `Runtime.close`
undoes `start`.
"""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

from triaxis.engine.comm.network import Interface, cluster_interface, interface_variables, listening_socket
from triaxis.engine.comm.placement import Place, facts_of, judge_places, place
from triaxis.engine.comm.store_agreement import compare_facts
from triaxis.engine.config.schema.run import RuntimeConfig
from triaxis.engine.device.allocator import set_up_allocator
from triaxis.engine.device.gpus import NCCL
from triaxis.engine.errors import TopologyError

FLIGHT_RECORDER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Variables that set how many calls NCCL's flight recorder keeps. Of the second, torch 2.9 and newer warn on every rank."""
FLIGHT_RECORDER_CALLS = "2000"

CONNECT_AT_ONCE = ("NCCL_RUNTIME_CONNECT", "0")
"""Since NCCL 2.22, an algorithm connects at its first use, in the middle of a step; 0 connects it when its group starts."""

_FLIGHT_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""torch functions that dump the flight record; builds without NCCL have only the second."""

COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """This process's number among all ranks, and the address where they meet. By default, the process runs alone.

    `restart_count` counts how often torchrun has restarted the ranks. Each restart meets in a store section of its own.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    restart_count: int = 0

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> "RankEnvironment":
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the restart count.

        If both RANK and WORLD_SIZE are unset, the process runs alone. If the LOCAL_ variables are unset, all ranks are on one node.

        Raises:
            TopologyError: only one of RANK and WORLD_SIZE is set, both are set without MASTER_PORT, or a number is invalid.
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
                f"know its place cannot join a group. Start with `triaxis train`, torchrun or srun."
            ) from error


@dataclass(frozen=True, slots=True)
class Runtime:
    """A started rank and its device. `close` destroys the default process group, if there is one."""

    device: torch.device

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def open_store(interface: Interface, port: int, timeout: timedelta, *, is_server: bool) -> dist.TCPStore:
    """Open the TCP store through which ranks or launchers exchange small facts.

    Args:
        interface: this node's interface to the others.
        port: the store's port; on the server, 0 picks a free one (then see `store.port`).
        timeout: time limit for each answer from the store.
        is_server: whether this process hosts the store; it then listens at the interface's address only.

    Raises:
        PortTakenError: the port cannot be bound, usually because another process listens there.
    """
    if not is_server:
        return dist.TCPStore(interface.store_host, port, is_master=False, multi_tenant=True, timeout=timeout)
    listener = listening_socket(interface, port)
    # The store closes the descriptor. It also connects to itself, at the address where it listens.
    port, descriptor = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(
        interface.address, port, is_master=True, multi_tenant=True, timeout=timeout, master_listen_fd=descriptor
    )


def write_flight_record(path: Path) -> None:
    """Write NCCL's last calls on this rank to `path`, as JSON. Without NCCL or its flight recorder, nothing is written."""
    if not dist.is_initialized() or dist.get_backend() != "nccl":
        return
    dump = next((getattr(_c10d, name) for name in _FLIGHT_RECORDERS if hasattr(_c10d, name)), None)
    with suppress(RuntimeError, OSError):
        if dump is not None:
            path.write_bytes(dump())


def flight_recorder(variables: Mapping[str, str]) -> dict[str, str]:
    """Build the environment variable that starts NCCL's flight recorder; {} if the user has set either name."""
    if any(variables.get(name) for name in FLIGHT_RECORDER_VARIABLES):
        return {}
    return {FLIGHT_RECORDER_VARIABLES[0]: FLIGHT_RECORDER_CALLS}


def compile_threads(local_world_size: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Build the environment variable that sets a rank's number of compiler workers.

    If ranks share cores, each rank gets an equal part of them. A rank with cores of its own (srun --cpus-per-task) uses all of
    them. Return {} if the user has set the variable.
    """
    if variables.get(COMPILE_THREADS):
        return {}
    own, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    is_shared = own * local_world_size > all_cores
    return {COMPILE_THREADS: str(max(1, own // local_world_size if is_shared else own))}


def start(environment: RankEnvironment, config: RuntimeConfig) -> Runtime:
    """Take the device and join the default process group. A process that runs alone joins none.

    Environment variables for compile workers, sockets and NCCL are set, unless the user has set them. Rank 0's store and the gloo
    and NCCL sockets listen only on the interface that leads to MASTER_ADDR. A hand-started torchrun uses torch's store, which
    listens on all interfaces.

    Raises:
        TopologyError: raised on every rank, if one rank cannot use its device, or if the ranks' devices and backends are
            incompatible.
        PeerLostError: a rank does not answer within `runtime.timeout_seconds`.
    """
    os.environ.update(compile_threads(environment.local_world_size, os.environ))
    store = _meet(environment, config) if environment.world_size > 1 else None
    where, problem = None, ""
    try:
        where = _take(environment, config)
    except TopologyError as error:
        if store is None:
            raise
        problem = str(error)
    if store is not None:
        facts = {"host": socket.gethostname(), "problem": problem} if where is None else facts_of(where)
        places, per_node = dist.PrefixStore("places", store), environment.local_world_size
        compare_facts(places, environment.rank, environment.world_size, facts, judge_places, per_node)
    assert where is not None, "a rank without a place is a bad verdict, which raises"
    if store is not None:
        if where.backend == NCCL:
            os.environ.update(flight_recorder(os.environ))
            os.environ.setdefault(*CONNECT_AT_ONCE)
        # No `device_id`: with it, torch makes every later group by splitting the default communicator. That needs all ranks
        # to take part, but each topology group is made by its own members alone.
        dist.init_process_group(
            where.backend,
            store=store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timedelta(seconds=config.timeout_seconds),
        )
    return Runtime(where.device)


def _meet(environment: RankEnvironment, config: RuntimeConfig) -> dist.Store:
    """Connect to the store, and open a section for this start or restart. Rank 0 or the launcher hosts the store."""
    assert environment.master_port is not None, "a group of several ranks has an address"
    hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    interface = cluster_interface(
        environment.master_addr,
        several_nodes=environment.world_size > environment.local_world_size,
        variables=os.environ,
    )
    os.environ.update(interface_variables(interface, os.environ))
    is_server = environment.rank == 0 and not hosted_by_launcher
    timeout = timedelta(seconds=config.timeout_seconds)
    store = open_store(interface, environment.master_port, timeout, is_server=is_server)
    # A launcher's store outlives a run's phases; the launcher starts each phase under its own name.
    start = os.environ.get("TORCHELASTIC_RUN_ID", "none") if hosted_by_launcher else "none"
    return dist.PrefixStore(f"{start}/attempt/{environment.restart_count}", store)


def _take(environment: RankEnvironment, config: RuntimeConfig) -> Place:
    """Choose this rank's device. Set up a GPU's allocator and determinism and make it current, or set a CPU's threads.

    Raises:
        TopologyError: the rank cannot use the device.
    """
    where = place(config, environment.local_rank, os.environ)
    if where.device.type != "cuda":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return where
    if environment.world_size > 1 and where.backend == NCCL and not dist.is_nccl_available():
        raise TopologyError(
            f"torch {torch.__version__} on {socket.gethostname()} has no NCCL, and ranks on GPUs would have nothing to talk "
            f"through. Use a CUDA build of torch, or, slowly, runtime.collectives=gloo."
        )
    try:
        torch.cuda.set_device(where.device)
    except RuntimeError as error:
        raise TopologyError(
            f"{socket.gethostname()}: this rank cannot use {where.device}: {str(error).splitlines()[0]}. Another process may hold "
            f"the GPU alone, or it is broken: see nvidia-smi."
        ) from error
    set_up_allocator(config, os.environ, where.device)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return where
