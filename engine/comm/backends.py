"""Calls torch.distributed, and hides the differences between gloo, NCCL and the fake backend.

- gloo's own tensor reduce-scatter sends twice the bytes. So this module exchanges the chunks by all-to-all and sums them in rank
  order, in the accumulation dtype. That order does not depend on how buckets are cut.
- torch 2.13 renamed `reduce_scatter_tensor` and `all_gather_into_tensor` to `*_single`.
- The first point-to-point call on an NCCL group must involve the whole group, so `connect` reduces one element beforehand.
- A pair's first NCCL message blocks the host until the peer makes the mirrored call. So `connect_ring` opens the connections
  between ring neighbours.
- gloo's sends cannot be queried for completion, so one thread per axis waits for them.
- The fake backend (used for a footprint) has no peers, so its sends never complete.
- gloo reads host memory only. GPU tensors are copied to the host and back (`triaxis.engine.comm.staging`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from triaxis.engine.comm.ledger import Event, Ledger
from triaxis.engine.comm.staging import CPU, Carrier, Seen, TensorUse, Work
from triaxis.engine.numerics.precision import accumulate

ReduceOp = Literal["sum", "max"]

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_P2P = {"send": dist.isend, "recv": dist.irecv}


@dataclass(frozen=True, slots=True)
class Message:
    """One tensor to send to, or receive from, the member `peer` (an index on the axis)."""

    kind: Literal["send", "recv"]
    tensor: torch.Tensor
    peer: int


class Pending:
    """An asynchronous call, which keeps its tensors alive until `wait()`.

    `wait()` may be called repeatedly.

    Args:
        result: tensor that `wait` returns, unless `finish` computes another.
        work: the backend's handles; empty if nothing is in flight.
        finish: function () -> result, called once the handles have completed; None: the result is `result`.
        written: (ledger, event) that record the call; the ledger's observers are notified; None: the call is not recorded.
        keep: further tensors to keep alive until the wait.
    """

    def __init__(
        self,
        result: torch.Tensor,
        work: Sequence[Work] = (),
        finish: Callable[[], torch.Tensor] | None = None,
        written: tuple[Ledger, Event] | None = None,
        keep: Sequence[torch.Tensor] = (),
    ) -> None:
        self._result = result
        self._work = work
        self._finish = finish
        self._written = written
        self._keep = keep
        if written is not None and work:
            ledger, posted = written
            for observer in ledger.observers:
                observer.under_way(posted, work)

    def wait(self) -> torch.Tensor:
        """Wait for the call and return its result. With NCCL the current stream waits, not the host."""
        if self._work:
            if self._written is not None:
                ledger, posted = self._written
                for observer in ledger.observers:
                    observer.wait_begins(posted)
            for work in self._work:
                work.wait()
            if self._finish is not None:
                self._result = self._finish()
            if self._written is not None:
                ledger.wait_ends(posted)
            self._work, self._finish, self._written, self._keep = (), None, None, ()
        return self._result

    @property
    def completed(self) -> bool:
        """Whether `wait()` would return at once; never blocks."""
        return all(work.is_completed() for work in self._work)


class _WatchedSend:
    """A gloo send that a thread waits for, so that `is_completed` never blocks."""

    def __init__(self, watcher: ThreadPoolExecutor, work: Work) -> None:
        self._done: Future[Any] = watcher.submit(work.wait)

    def wait(self) -> None:
        self._done.result()

    def is_completed(self) -> bool:
        return self._done.done()


class _TakenSend:
    """A send on the fake backend, which counts as complete at once."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class Backend:
    """One process group and its torch.distributed calls, the same for every backend.

    Args:
        group: process group with more than one rank.
        ranks: the members' global ranks, in order.
        carrier: object through which the group's calls go (`triaxis.engine.comm.staging`); None: calls go to torch directly.
    """

    def __init__(
        self, name: str, group: dist.ProcessGroup, ranks: Sequence[int], carrier: Carrier | None = None
    ) -> None:
        self.group = group
        self.carrier = carrier
        self.kind = dist.get_backend(group)
        self._name = name
        self._ranks = ranks
        self._watcher: ThreadPoolExecutor | None = None

    def call(self, call: Callable[[Seen], Sequence[Any]], *uses: TensorUse) -> list[Work]:
        """Make `call` directly, or through `self.carrier` (such as `Staging`) if set. Return one handle per use.

        Args:
            call: function (seen) -> handles, which calls torch with `seen(tensor)` in place of each tensor. `seen` returns the
                tensor itself, or its copy in host memory.
            uses: for each handle, the tensors that its call reads and writes.
        """
        if self.carrier is not None:
            return self.carrier.post(call, uses)
        works = list(call(lambda tensor: tensor))
        assert None not in works, "an asynchronous call on a group of this rank returns a handle"
        return works

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> list[Work]:
        """Post an all-reduce on `tensor`, in place."""
        return self.call(
            lambda seen: [dist.all_reduce(seen(tensor), _REDUCE_OPS[op], group=self.group, async_op=True)],
            TensorUse([tensor], [tensor]),
        )

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> list[Work]:
        """Post an all-gather that copies each member's `part` into `whole`."""
        return self.call(
            lambda seen: [_ALL_GATHER(seen(whole), seen(part), group=self.group, async_op=True)],
            TensorUse([part], [whole]),
        )

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, rows_received: Any = None, rows_sent: Any = None
    ) -> list[Work]:
        """Post an all-to-all that sends rows from `sent` and fills `received`.

        `rows_sent` and `rows_received` count the rows per member; None splits them equally.
        """
        rows = rows_received, rows_sent
        return self.call(
            lambda seen: [dist.all_to_all_single(seen(received), seen(sent), *rows, group=self.group, async_op=True)],
            TensorUse([sent], [received]),
        )

    def broadcast(self, tensor: torch.Tensor, source: int, *, is_source: bool) -> list[Work]:
        """Post a broadcast that copies the global rank `source`'s `tensor` to all members."""
        return self.call(
            lambda seen: [dist.broadcast(seen(tensor), source, group=self.group, async_op=True)],
            TensorUse([tensor]) if is_source else TensorUse((), [tensor]),
        )

    def connect(self, device: torch.device) -> None:
        """Open the connections that the group's collectives use."""
        dist.all_reduce(torch.zeros(1, device=self._device(device)), group=self.group)
        self._synchronize(device)

    def connect_ring(self, device: torch.device, index: int) -> None:
        """Open member `index`'s connections to both ring neighbours, each way, in one group call.

        All members call this while no message is in flight.
        """
        following, preceding = ((index + step) % len(self._ranks) for step in (1, -1))
        ends = [("send", following), ("recv", preceding), ("send", preceding), ("recv", following)]
        elements = torch.zeros(len(ends), 1, device=self._device(device))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(_P2P[kind], element, self._ranks[peer], self.group)
                for (kind, peer), element in zip(ends, elements.unbind(), strict=True)
            ]
        )
        # A send on the fake backend never completes, because no peer receives it.
        for work in () if self.kind == "fake" else works:
            work.wait()
        self._synchronize(device)

    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[Work], Callable[[], torch.Tensor] | None]:
        """Post a sum over the group that scatters `full` along dim 0.

        Returns:
            A tensor, the handles, and a function or None. The function computes the result once the handles have completed. Without
            a function, the tensor receives the result.
        """
        shape = (full.shape[0] // len(self._ranks), *full.shape[1:])
        if self.kind != "gloo":
            shard = full.new_empty(shape) if out is None else out
            works = self.call(
                lambda seen: [_REDUCE_SCATTER(seen(shard), seen(full), group=self.group, async_op=True)],
                TensorUse([full], [shard]),
            )
            return shard, works, None

        chunks = torch.empty_like(full)
        works = self.all_to_all(chunks, full)

        def sum_in_rank_order() -> torch.Tensor:
            first, second, *rest = chunks.view(len(self._ranks), *shape).unbind()
            total = torch.add(accumulate(first), second, out=out)
            for part in rest:
                total += part
            return total.to(full.dtype)

        return full, works, sum_in_rank_order

    def exchange(self, messages: Sequence[Message]) -> list[Sequence[Work]]:
        """Post messages as one group call and return each message's handles."""

        def post_the_group(seen: Seen) -> Sequence[Any]:
            return dist.batch_isend_irecv(
                [
                    dist.P2POp(_P2P[message.kind], seen(message.tensor), self._ranks[message.peer], self.group)
                    for message in messages
                ]
            )

        uses = [TensorUse([one.tensor]) if one.kind == "send" else TensorUse((), [one.tensor]) for one in messages]
        works = self.call(post_the_group, *uses)
        # A coalescing backend returns one handle for the whole group call; others return one per message.
        if len(works) != len(messages):
            return [works] * len(messages)
        if self.kind == "fake" and self.carrier is None:
            works = [_TakenSend() if one.kind == "send" else work for one, work in zip(messages, works, strict=True)]
        elif self.kind == "gloo":
            if self._watcher is None:
                self._watcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{self._name}-sends")
            watcher = self._watcher
            works = [
                _WatchedSend(watcher, work) if one.kind == "send" else work
                for one, work in zip(messages, works, strict=True)
            ]
        return [[work] for work in works]

    def close(self) -> None:
        """Stop the thread that watches sends, if there is one."""
        if self._watcher is not None:
            self._watcher.shutdown(wait=False, cancel_futures=True)
            self._watcher = None

    def _device(self, device: torch.device) -> torch.device:
        return CPU if self.kind == "gloo" else device

    def _synchronize(self, device: torch.device) -> None:
        """With NCCL, wait until the device has run the posted calls."""
        if self.kind == "nccl":
            torch.cuda.synchronize(device)
