"""What one GPU can show of NCCL: a process group of one rank makes NCCL's real calls, on its own stream.

The engine makes no group for an axis of one rank, so these tests put one behind an axis by hand. NCCL between GPUs is what
`triaxis verify --matrix` shows where there are several.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from triaxis.engine.comm.backends import Backend, Pending
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import Ledger
from triaxis.engine.comm.texts import gather_text

pytestmark = pytest.mark.gpu


def axis_of_one() -> Axis:
    axis = Axis("dp", [0], 0, None, Ledger())
    axis._backend = Backend("dp", dist.group.WORLD, [0])
    axis.connect(torch.device("cuda", 0))
    return axis


@pytest.fixture
def axis(tmp_path: Any) -> Any:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield axis_of_one()
    dist.destroy_process_group()


def calls(axis: Axis, x: torch.Tensor) -> dict[str, Pending]:
    return {
        "all_reduce": axis.all_reduce(x.clone(), "test"),
        "max": axis.all_reduce(x.clone(), "test", op="max"),
        "all_gather": axis.all_gather(x, "test"),
        "all_gather in place": axis.all_gather(x, "test", out=x),
        "reduce_scatter": axis.reduce_scatter(x, "test"),
        "reduce_scatter in place": axis.reduce_scatter(x, "test", out=x),
        "broadcast": axis.broadcast(x.clone(), 0, "test"),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_verb_is_the_identity(axis: Axis, dtype: torch.dtype) -> None:
    x = torch.arange(4096, device="cuda").to(dtype)
    expected = x.clone()
    pending = calls(axis, x)
    for name, each in pending.items():
        assert torch.equal(each.wait(), expected), name
        assert each.completed
    assert [event.phase for event in axis.ledger.events].count("wait") == len(pending)
    assert axis.sum_values([2.0, 3.0], torch.device("cuda", 0), "test") == [2.0, 3.0]
    assert gather_text(axis, "a folder", torch.device("cuda", 0), "test") == ["a folder"]


@pytest.mark.card
def test_a_call_stands_behind_what_makes_its_tensor_and_the_host_waits_for_neither(axis: Axis) -> None:
    """The tensor is made by a long row of kernels on a stream that is not the default one; another one reads the result."""
    maker, reader = torch.cuda.Stream(), torch.cuda.Stream()
    big = torch.ones(4096, 4096, device="cuda")
    calls(axis, torch.ones(8, device="cuda"))["all_reduce"].wait()  # NCCL has started, kernels are loaded
    big @ big
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(maker):
            product = big
            for _ in range(30):
                product = product @ big / 4096
            pending = axis.all_reduce(product * 3, "test")
            del product
            posted = torch.cuda.Event()
            posted.record()
        with torch.cuda.stream(reader):
            reduced = pending.wait()
            was_busy = not posted.query()
            result = reduced + 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert was_busy, "the host went on while the kernels ran"
    assert bool((result == 4).all())
