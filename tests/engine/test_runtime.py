"""How a rank starts: its place among the others, the allocator before the first tensor, the variables that torch and NCCL read."""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import RuntimeConfig
from engine.errors import TopologyError
from engine.nvidia_driver import Driver
from engine.runtime import (
    ALLOCATOR_VARIABLES,
    COMPILE_THREADS,
    RankEnvironment,
    compile_threads,
    set_up_allocator,
    start,
)
from tests.harness import run_ranks


def config(**given: Any) -> RuntimeConfig:
    return RuntimeConfig(**given)


def test_segments_grow_unless_the_user_has_said_how_memory_is_had() -> None:
    applied: list[str] = []
    set_up_allocator(config(), {"PATH": "/bin", "PYTORCH_ALLOC_CONF": ""}, applied.append)
    assert applied == ["expandable_segments:True"]
    for name in ALLOCATOR_VARIABLES:
        set_up_allocator(config(), {name: "max_split_size_mb:512"}, applied.append)
    set_up_allocator(config(expandable_segments=False), {}, applied.append)
    assert len(applied) == 1


def test_torch_takes_the_words(recwarn: pytest.WarningsRecorder) -> None:
    set_up_allocator(config(), {})
    assert not recwarn.list
    assert torch.ones(2).sum() == 2


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
import launch.pretrain_gpt
from engine.config import RuntimeConfig
from engine.runtime import RankEnvironment, start
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
    import engine.runtime

    engine.runtime.set_up_allocator = None  # type: ignore[assignment] # calling it would fail
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


def outcome_of_start(rank: int, port: int, without: list[int]) -> tuple[str, float]:
    """Start a rank where the driver shows 8 GPUs; torch can use them on all ranks but `without`. Returns what it raises."""
    import engine.gpus

    usable = 0 if rank in without else 8
    engine.gpus.read_driver = lambda: Driver("550.54.14", 8)  # type: ignore[assignment]
    torch.cuda.is_available = lambda: usable > 0
    torch.cuda.device_count = lambda: usable
    torch.cuda.set_device = lambda device: None
    torch.distributed.is_nccl_available = lambda: True
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=f"GPU-{rank}")  # type: ignore[assignment]
    torch.distributed.barrier()  # a rank that left the harness's group while others still connect would break them
    torch.distributed.destroy_process_group()
    begun_seconds = time.monotonic()
    with pytest.raises(TopologyError) as error:
        start(RankEnvironment(rank, 4, rank, 4, "127.0.0.1", port), config(expandable_segments=False))
    return str(error.value), time.monotonic() - begun_seconds


@pytest.mark.distributed
@pytest.mark.parametrize(("without", "named"), [([0, 1, 2, 3], "ranks 0 to 3"), ([2], "rank 2")], ids=["all", "one"])
def test_a_rank_without_its_gpu_ends_all_ranks(without: list[int], named: str) -> None:
    for text, seconds in run_ranks(outcome_of_start, 4, free_port(), without):
        assert text.startswith(f"{named}: {socket.gethostname()} has 8 GPUs with driver 550.54.14")
        assert seconds < 10


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
