"""How a rank starts: its place among the others, the variables that torch and NCCL read."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from triaxis.engine.comm.runtime import (
    COMPILE_THREADS,
    CONNECT_AT_ONCE,
    FLIGHT_RECORDER_VARIABLES,
    RankEnvironment,
    compile_threads,
    flight_recorder,
    start,
)
from triaxis.engine.config.schema.run import RuntimeConfig
from triaxis.engine.device.nvidia_driver import Driver
from triaxis.engine.errors import TopologyError


def config(**given: Any) -> RuntimeConfig:
    return RuntimeConfig(**given)


def test_compile_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(own: int, in_node: int, ranks: int, **variables: str) -> dict[str, str]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(own)))
        monkeypatch.setattr(os, "cpu_count", lambda: in_node)
        return compile_threads(ranks, variables)

    assert threads(96, 96, 8) == {COMPILE_THREADS: "12"}
    assert threads(2, 2, 8) == {COMPILE_THREADS: "1"}
    assert threads(16, 64, 8) == {COMPILE_THREADS: "2"}, "a container's share of the node"
    assert threads(8, 64, 8) == {COMPILE_THREADS: "8"}, "cores of the task's own"
    assert threads(96, 96, 8, **{COMPILE_THREADS: "3"}) == {}


STARTED_RANK = """
import os
os.sched_getaffinity, os.cpu_count = lambda process: set(range(24)), lambda: 24
import triaxis.launch.pretrain_gpt
from triaxis.engine.config.schema.run import RuntimeConfig
from triaxis.engine.comm.runtime import RankEnvironment, start
start(RankEnvironment(local_world_size=4), RuntimeConfig(device="cpu"))
import torch._inductor.config
print(torch._inductor.config.compile_threads)
"""


@pytest.mark.slow  # importing the compiler takes seconds
@pytest.mark.distributed
def test_the_compiler_is_imported_after_a_rank_has_set_its_share() -> None:
    variables = {name: value for name, value in os.environ.items() if name != COMPILE_THREADS}
    ran = subprocess.run(
        [sys.executable, "-c", STARTED_RANK], env=variables, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split()[-1] == "6"


def on_the_cpu(rank: int) -> bool:
    import triaxis.engine.comm.runtime

    triaxis.engine.comm.runtime.set_up_allocator = None  # type: ignore[assignment] # calling it would fail
    os.environ.pop(COMPILE_THREADS, None)
    runtime = start(RankEnvironment(), config(device="cpu"))
    return runtime.device.type == "cpu" and os.environ[COMPILE_THREADS] == str(len(os.sched_getaffinity(0)))


@pytest.mark.distributed
def test_nothing_is_set_up_on_the_cpu() -> None:
    assert run_ranks(on_the_cpu, 1) == [True]


# One rank of four --------------------------------------------------------------------------------------------------------


def free_port() -> int:
    """A port that nobody listens at, below those that Linux hands out to outgoing connections."""
    for port in range(15_000 + os.getpid() % 10_000, 30_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def start_on_gpus(
    rank: int, port: int, usable: Sequence[int], uuids: Sequence[str]
) -> tuple[str, float, dict[str, str]]:
    """Start a rank where the driver shows 8 GPUs, and everything of CUDA and NCCL is pretended.

    Args:
        rank: of four.
        port: of rank 0's store.
        usable: GPUs that torch can use, by rank.
        uuids: of the GPU that a rank takes.

    Returns:
        Its device or the error, seconds, variables for NCCL.
    """
    import triaxis.engine.device.gpus

    triaxis.engine.device.gpus.read_driver = lambda: Driver("550.54.14", 8)  # type: ignore[assignment]
    torch.cuda.is_available = lambda: usable[rank] > 0
    torch.cuda.device_count = lambda: usable[rank]
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=uuids[rank])  # type: ignore[assignment]
    dist.is_nccl_available = lambda: True
    dist.barrier()  # a rank that left the harness's group while others still connect would break them
    dist.destroy_process_group()
    joined = []
    # The lambda keeps rank 0's store for the others, as a process group does.
    dist.init_process_group = lambda backend, **words: joined.append((backend, words["store"]))
    begun_seconds = time.monotonic()
    try:
        runtime = start(RankEnvironment(rank, 4, rank, 4, "127.0.0.1", port), config(expandable_segments=False))
        outcome = f"{runtime.device} {[backend for backend, _ in joined]}"
    except TopologyError as error:
        outcome = str(error)
    seconds = time.monotonic() - begun_seconds
    return (
        outcome,
        seconds,
        {name: os.environ.get(name, "") for name in (*FLIGHT_RECORDER_VARIABLES, CONNECT_AT_ONCE[0])},
    )


DIFFERENT = ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("usable", "named"), [([0, 0, 0, 0], "ranks 0 to 3"), ([8, 8, 0, 8], "rank 2")], ids=["all", "one"]
)
def test_a_rank_without_its_gpu_ends_all_ranks(usable: list[int], named: str) -> None:
    for text, seconds, _ in run_ranks(start_on_gpus, 4, free_port(), usable, DIFFERENT):
        assert text.startswith(f"{named}: {socket.gethostname()} has 8 GPUs with driver 550.54.14")
        assert seconds < 10


def test_the_flight_recorder_is_started_by_the_name_that_torch_does_not_warn_of() -> None:
    """torch tries a list of names and warns of all but the first; a CPU build has the header too."""
    (name,) = flight_recorder({})
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/FlightRecorder.hpp"
    assert f'{{"{name}"' in header.read_text()
    for given in FLIGHT_RECORDER_VARIABLES:
        assert flight_recorder({given: "50"}) == {}, "a user's number stays, by either name"


@pytest.mark.distributed
def test_tasks_that_see_one_gpu_each_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*FLIGHT_RECORDER_VARIABLES, CONNECT_AT_ONCE[0]):
        monkeypatch.delenv(name, raising=False)
    wanted = dict.fromkeys(FLIGHT_RECORDER_VARIABLES, "") | flight_recorder({}) | {"NCCL_RUNTIME_CONNECT": "0"}
    for taken, _, variables in run_ranks(start_on_gpus, 4, free_port(), [1] * 4, DIFFERENT):
        assert taken == "cuda:0 ['nccl']"
        assert variables == wanted
    shared = ["GPU-0", "GPU-1", "GPU-2", "GPU-0"]
    for text, _, _ in run_ranks(start_on_gpus, 4, free_port(), [1] * 4, shared):
        assert text.startswith(f"ranks 0 and 3 on {socket.gethostname()} have one GPU (GPU-0) between them")


# On a card ---------------------------------------------------------------------------------------------------------------


def has_growing_segments(rank: int, variables: dict[str, str]) -> bool:
    import os

    os.environ.update(variables)
    start(RankEnvironment(), config(device="cuda"))
    kept = torch.ones(1 << 20, device="cuda")
    return any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()) and kept.is_cuda


@pytest.mark.gpu
def test_the_first_tensor_of_a_rank_is_in_a_segment_that_grows() -> None:
    assert run_ranks(has_growing_segments, 1, {}) == [True]
    assert run_ranks(has_growing_segments, 1, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}) == [False]
