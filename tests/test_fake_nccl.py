"""The fake NCCL group does what it says, so that tests over it mean something."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.fake_nccl import NAME
from tests.harness import run_ranks

pytestmark = pytest.mark.distributed


def exchange(rank: int, kinds: str, peer: int) -> torch.Tensor:
    """A group call of a send and a receive, or of one of them."""
    functions = {"s": dist.isend, "r": dist.irecv}
    tensors = [torch.full((2,), float(rank)) for _ in kinds]
    works = dist.batch_isend_irecv(
        [dist.P2POp(functions[kind], tensor, peer) for kind, tensor in zip(kinds, tensors, strict=True)]
    )
    assert len(works) == 1, "one handle for the whole group call"
    works[0].wait()
    return tensors[-1]


def all_calls(rank: int) -> None:
    x = torch.arange(4.0) + rank
    gathered, part = torch.empty(8), torch.empty(2)
    dist.all_gather_into_tensor(gathered, x)
    assert gathered.tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
    dist.reduce_scatter_tensor(part, x)
    assert part.tolist() == ([1, 3], [5, 7])[rank]
    dist.all_reduce(x)
    assert x.tolist() == [1, 3, 5, 7]
    dist.broadcast(x.mul_(rank), 1)
    assert x.tolist() == [1, 3, 5, 7]
    assert exchange(rank, "sr", 1 - rank).tolist() == [1 - rank] * 2
    dist.destroy_process_group()


def test_calls_are_those_of_every_backend() -> None:
    run_ranks(all_calls, 2, backend=NAME)


def first_message(rank: int, seconds: float) -> float:
    """How long posting the first message of a pair blocks; rank 1 posts the mirrored one after `seconds`."""
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        time.sleep(seconds)
    tensor = torch.ones(1)
    started = time.monotonic()
    work = dist.batch_isend_irecv([dist.P2POp((dist.isend, dist.irecv)[rank], tensor, 1 - rank)])
    blocked = time.monotonic() - started
    again = time.monotonic()
    if rank == 0:
        work += dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1)])
        assert time.monotonic() - again < seconds / 2, "the second of a pair is posted at once"
    else:
        exchange(rank, "r", 0)
    for one in work:
        one.wait()
    return blocked


def test_the_first_message_of_a_pair_blocks_until_it_is_mirrored() -> None:
    blocked, other = run_ranks(first_message, 2, 0.8, backend=NAME)
    assert blocked >= 0.7 and other < 0.4


def unmet(rank: int) -> tuple[str, str, bool]:
    """What rank 0 sees of a receive that rank 1 never meets: waiting for it, then shutting down before and after an abort."""
    exchange(rank, "sr", 1 - rank)
    if rank == 1:
        return "", "", True
    group = dist.group.WORLD
    [work] = dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(1), 1)])
    shutdown = threading.Thread(target=group.shutdown, daemon=True)
    shutdown.start()
    shutdown.join(0.5)
    said = []
    try:
        work.wait(timedelta(seconds=0.5))
    except dist.DistBackendError as error:
        said.append(str(error))
    blocks = shutdown.is_alive()
    group.abort()
    shutdown.join(5.0)
    try:
        work.wait()
    except dist.DistBackendError as error:
        said.append(str(error))
    return *said, blocks and not shutdown.is_alive()


def test_a_message_that_nobody_meets_times_out_and_holds_up_the_shutdown_until_an_abort() -> None:
    (timed_out, aborted, blocked_until_abort), _ = run_ranks(unmet, 2, backend=NAME)
    assert "has not ended within" in timed_out and "aborted" in aborted and blocked_until_abort
