"""Calls on tensors that the backend cannot read: what is copied when, in which order calls are made, what is kept how long.

On the CPU the copies are the worker's; with `-m gpu`, two ranks share a card and the copies are its streams'.
"""

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.engine.comm.test_collectives import check_every_verb, every_verb
from tests.harness import run_ranks
from triaxis.engine.comm.backends import Message
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.staging import CPU, Seen, Staging, TensorUse
from triaxis.engine.comm.topology import Topology
from triaxis.engine.device.pinned_memory import Pageable
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid


class Handle:
    """A call of a backend that ends when it is told to."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def wait(self) -> None:
        assert self.ended.wait(60)

    def is_completed(self) -> bool:
        return self.ended.is_set()


class HeldUp(Staging):
    """A worker that does nothing before it is let go: a GPU that is busy."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.go = threading.Event()
        self._worker.submit(self.go.wait, 60)


def doubling(tensor: torch.Tensor, seen_by_the_call: list[torch.Tensor], handle: Handle) -> Callable[[Seen], Any]:
    """A call that doubles what it sees, in place."""

    def call(seen: Seen) -> Sequence[Handle]:
        seen_by_the_call.append(seen(tensor))
        seen(tensor).mul_(2)
        return [handle]

    return call


def test_what_is_read_goes_out_and_what_is_written_comes_back_when_it_is_waited_for() -> None:
    staging, handle, seen = Staging(CPU), Handle(), list[torch.Tensor]()
    tensor = torch.ones(3)
    (work,) = staging.post(doubling(tensor, seen, handle), [TensorUse([tensor], [tensor])])
    assert not work.is_completed()
    handle.ended.set()
    (later,) = staging.post(lambda seen: [handle], [TensorUse()])
    later.wait()
    assert work.is_completed() and tensor.tolist() == [1, 1, 1], "nothing is written before the wait"
    work.wait()
    assert tensor.tolist() == [2, 2, 2]
    assert seen[0] is not tensor
    staging.close()


def test_calls_are_made_in_the_order_of_posts_and_post_never_waits() -> None:
    staging, made = HeldUp(), list[int]()
    works = []
    for number in range(20):
        tensor = torch.full((1,), float(number))

        def call(seen: Seen, tensor: torch.Tensor = tensor) -> Sequence[Handle]:
            made.append(int(seen(tensor)))
            handle = Handle()
            handle.ended.set()
            return [handle]

        works += staging.post(call, [TensorUse([tensor])])
    assert made == [] and not any(work.is_completed() for work in works)
    staging.go.set()
    for work in works:
        work.wait()
    staging.close()
    assert made == list(range(20))


def test_who_changes_a_tensor_before_its_call_is_made_sends_the_wrong_numbers() -> None:
    """So that a test on the CPU fails where a GPU's copy would have been late."""
    staging, handle, seen = HeldUp(), Handle(), list[torch.Tensor]()
    tensor = torch.ones(1)
    (work,) = staging.post(doubling(tensor, seen, handle), [TensorUse([tensor])])
    tensor.fill_(5)
    staging.go.set()
    handle.ended.set()
    work.wait()
    staging.close()
    assert seen[0].tolist() == [10]


def test_a_tensor_lives_until_its_copy_is_made_and_no_longer() -> None:
    staging, handle = HeldUp(), Handle()
    tensor = torch.ones(3)
    there, seen = weakref.ref(tensor), list[torch.Tensor]()
    (work,) = staging.post(doubling(tensor, seen, handle), [TensorUse([tensor])])
    del tensor
    assert there() is not None
    staging.go.set()
    handle.ended.set()
    work.wait()
    staging.close()
    gc.collect()
    assert there() is None and seen[0].tolist() == [2, 2, 2]


def test_a_call_that_fails_raises_where_it_is_waited_for_and_the_next_is_made() -> None:
    staging, handle = Staging(CPU), Handle()
    handle.ended.set()

    def fail(seen: Seen) -> Sequence[Handle]:
        raise RuntimeError("the peer is gone")

    tensor = torch.ones(1)
    (failed,) = staging.post(fail, [TensorUse([tensor])])
    (work,) = staging.post(doubling(tensor, [], handle), [TensorUse([tensor], [tensor])])
    work.wait()
    assert tensor.tolist() == [2] and failed.is_completed()
    with pytest.raises(RuntimeError, match="the peer is gone"):
        failed.wait()
    staging.close()


def test_host_memory_is_locked_once_and_reused_by_later_calls() -> None:
    locked = list[int]()

    class Lock(Pageable):
        def lock(self, memory: torch.Tensor) -> None:
            locked.append(memory.nbytes)

        def unlock(self, memory: torch.Tensor) -> None:
            locked.remove(memory.nbytes)

    staging, handle, tensor = Staging(CPU, Lock()), Handle(), torch.ones(3000)
    handle.ended.set()
    for number in range(5):
        (work,) = staging.post(doubling(tensor, [], handle), [TensorUse([tensor], [tensor])])
        work.wait()
        assert len(locked) == 1, f"call {number}"
    assert tensor[0] == 2**5 and locked == [3 * 4096]
    staging.close()
    assert locked == []


def test_a_call_keeps_its_memory_until_all_its_handles_were_waited_for() -> None:
    staging, handle = Staging(CPU), Handle()
    handle.ended.set()
    sent, received = torch.ones(4), torch.zeros(4)
    seen_by_the_exchange, seen_by_others = list[torch.Tensor](), list[torch.Tensor]()

    def exchange(see: Seen) -> Sequence[Handle]:
        seen_by_the_exchange.extend((see(sent), see(received)))
        see(received).copy_(see(sent) * 3)
        return [handle, handle]

    def use_memory(num_calls: int) -> None:
        others = [torch.full((4,), 7.0) for _ in range(num_calls)]
        works = [
            staging.post(doubling(each, seen_by_others, handle), [TensorUse([each], [each])])[0] for each in others
        ]
        for work in works:
            work.wait()

    send, receive = staging.post(exchange, [TensorUse([sent]), TensorUse((), [received])])
    send.wait()
    use_memory(2)
    receive.wait()
    assert received.tolist() == [3] * 4
    use_memory(4)
    receive.wait()
    assert received.tolist() == [3] * 4, "a second wait brings nothing of the calls that have its memory now"
    addresses = {tensor.data_ptr() for tensor in seen_by_others}
    assert len(addresses) == 4 and addresses > {tensor.data_ptr() for tensor in seen_by_the_exchange}
    staging.close()


@pytest.mark.distributed
def test_every_verb() -> None:
    found = run_ranks(every_verb, 4, "cpu", True)
    check_every_verb(found)
    assert all(got["c10d"] == [] for got in found), "calls are the worker's, not this thread's"


def sends(rank: int, device: str) -> tuple[bool, bool, list[float]]:
    """(completed while nobody receives, completed at last, the smallest and the largest that came) of a large send."""
    where = torch.device(device, 0)
    topology = Topology(RankGrid(ParallelSizes(pp=2)), rank, where, staged=True)
    axis, signal = topology.axis("pp_forward"), topology.axis("pp_backward")
    early, late = False, False
    got = torch.zeros(0, device=where)
    numel = 4_000_000
    if rank == 0:
        (pending,) = axis.exchange([Message("send", torch.full((numel,), 3.0, device=where), 1)], "test")
        early = pending.completed
        signal.sum_values([1.0], where, "go")
        pending.wait()
        late = pending.completed
    else:
        signal.sum_values([1.0], where, "go")
        got = receive(axis, numel, where)
    topology.close()
    return early, late, [] if rank == 0 else [float(got.min()), float(got.max())]


def receive(axis: Axis, numel: int, where: torch.device) -> torch.Tensor:
    (pending,) = axis.exchange([Message("recv", torch.empty(numel, device=where), 0)], "test")
    return pending.wait()


@pytest.mark.distributed
def test_a_send_is_over_when_it_was_taken() -> None:
    assert run_ranks(sends, 2, "cpu") == [(False, True, []), (False, False, [3.0, 3.0])]


def shared_group(rank: int) -> tuple[bool, list[float]]:
    """Two axes with the same ranks: one worker; calls of both, posted in turns and waited for in another order."""
    topology = Topology(RankGrid(ParallelSizes(dp=2)), rank, CPU, staged=True)
    dp, world = topology.axis("dp"), topology.axis("world")
    pending = [axis.all_reduce(torch.tensor([float(place)]), "test") for place, axis in enumerate((dp, world) * 5)]
    values = [float(each.wait()) for each in reversed(pending)]
    is_one = dp._backend.carrier is world._backend.carrier is not None
    topology.close()
    return is_one, values


@pytest.mark.distributed
def test_axes_of_one_process_group_have_one_order() -> None:
    expected = [2.0 * place for place in reversed(range(10))]
    assert run_ranks(shared_group, 2) == [(True, expected)] * 2


# On a card ---------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_every_verb_between_ranks_that_share_a_card(size: int) -> None:
    check_every_verb(run_ranks(every_verb, size, "cuda", True, size, device="cuda", staged=True))


@pytest.mark.gpu
def test_a_send_from_a_card_is_over_when_it_was_taken() -> None:
    found = run_ranks(sends, 2, "cuda", device="cuda", staged=True)
    assert found == [(False, True, []), (False, False, [3.0, 3.0])]


def behind_a_long_kernel(rank: int) -> tuple[list[float], bool]:
    """Reduce what a long kernel makes on a stream that is not the default one; read it on another, after the wait only."""
    device = torch.device("cuda", 0)
    topology = Topology(RankGrid(ParallelSizes(tp=2)), rank, device, staged=True)
    axis = topology.axis("tp")
    maker, reader = torch.cuda.Stream(device), torch.cuda.Stream(device)
    values = []
    posted_early = True
    for number in range(8):
        with torch.cuda.stream(maker):
            big = torch.ones(2048, 2048, device=device)
            for _ in range(20):
                big = big @ big / 2048
            summed = big[:4, :4].contiguous() * (rank + 1 + number)
            busy = torch.cuda.Event()
            busy.record()
            pending = axis.all_reduce(summed, "test")
            posted_early &= number == 0 or not busy.query()
        reader.wait_stream(maker)
        with torch.cuda.stream(reader):
            values.append(float(pending.wait().sum()))
        del big, summed, pending
    topology.close()
    return values, posted_early


@pytest.mark.gpu
@pytest.mark.card
def test_a_call_waits_for_the_stream_that_made_its_tensor_and_post_waits_for_nothing() -> None:
    expected = [16.0 * (3 + 2 * number) for number in range(8)]
    for values, posted_early in run_ranks(behind_a_long_kernel, 2, device="cuda", staged=True):
        assert values == expected
        assert posted_early
