"""The only caller of torch.distributed's communication: every collective and every send, labelled and written down.

An `Axis` is one group of ranks as one member sees it. Its verbs return a `Pending`, whose `wait()` gives the result; what
lies between posting and waiting is overlapped. A one-rank axis is the identity and issues no op: this file is the only
place that knows it. Each call is labelled with its purpose and written to the `Ledger`; what backends do differently is in
`triaxis.engine.comm.backends`.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Literal

import torch
import torch.distributed as dist

from triaxis.engine.comm.backends import ALL_GATHER, Backend, Message
from triaxis.engine.comm.ledger import Event, Ledger
from triaxis.engine.comm.staging import Carrier, TensorUse, Work
from triaxis.engine.numerics.precision import AGREEMENT_DTYPE

ReduceOp = Literal["sum", "max"]

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Pending:
    """A call under way. It keeps its tensors alive until `wait()`, which may be called again and again."""

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
        self._done = not work
        if written is not None and work:
            ledger, posted = written
            ledger.under_way(posted, work)

    def wait(self) -> torch.Tensor:
        """Return the result once it is there. With NCCL the current stream waits, not the host."""
        if not self._done:
            if self._written is not None:
                ledger, posted = self._written
                ledger.wait_begins(posted)
            for work in self._work:
                work.wait()
            if self._finish is not None:
                self._result = self._finish()
            if self._written is not None:
                ledger.wait_ends(posted)
            self._work, self._finish, self._written, self._keep = (), None, None, ()
            self._done = True
        return self._result

    @property
    def completed(self) -> bool:
        """Return whether `wait()` would return at once; never block."""
        return self._done or all(work.is_completed() for work in self._work)


class Axis:
    """One group of ranks, as this member sees it.

    Attributes:
        name: the axis ("tp", "dp", "pp_forward", ...): how the ledger labels its calls.
        ranks: global ranks of the members, in order.
        index: which member this rank is.
        size: number of members.

    Args:
        group: of the ranks; None for a group of one.
        carrier: makes the calls of the group (`triaxis.engine.comm.staging`); None: the axis does.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None,
        ledger: Ledger,
        carrier: Carrier | None = None,
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.ledger = ledger
        assert (group is None) == (self.size == 1), "a group of one rank needs no process group, any other does"
        self._backend = None if group is None else Backend(name, group, self.ranks, carrier)

    def with_ledger(self, ledger: Ledger) -> "Axis":
        """Return this axis, same process group included, with another ledger."""
        axis = copy(self)
        axis.ledger = ledger
        return axis

    def connect(self, device: torch.device) -> None:
        """Open the connections now, so that a missing peer shows at start and not in the first step."""
        if self._backend is not None:
            self._backend.connect(device)

    def connect_ring(self, device: torch.device) -> None:
        """Open the point-to-point connections to both ring neighbours, each way; all members call it."""
        if self._backend is not None:
            self._backend.connect_ring(device, self.index)

    def all_reduce(self, tensor: torch.Tensor, purpose: str, op: ReduceOp = "sum") -> Pending:
        """Reduce `tensor` over the axis, in place."""
        backend = self._backend
        if backend is None:
            return Pending(tensor)
        posted = self.ledger.post("all_reduce", self.name, purpose, tensor, self.size)
        work = backend.call(
            lambda seen: [dist.all_reduce(seen(tensor), _REDUCE_OPS[op], group=backend.group, async_op=True)],
            TensorUse([tensor], [tensor]),
        )
        return Pending(tensor, work, written=(self.ledger, posted))

    def all_gather(self, shard: torch.Tensor, purpose: str, out: torch.Tensor | None = None) -> Pending:
        """Concatenate the members' shards [n, ...] along dim 0 to [size * n, ...].

        With `out`, the result is written there; `shard` may be this member's slice of it.
        """
        backend = self._backend
        if backend is None:
            return Pending(shard if out is None else out)
        if out is None:
            out = shard.new_empty((self.size * shard.shape[0], *shard.shape[1:]))
        shard = shard.contiguous()
        posted = self.ledger.post("all_gather", self.name, purpose, shard, self.size)
        whole, part = out, shard
        work = backend.call(
            lambda seen: [ALL_GATHER(seen(whole), seen(part), group=backend.group, async_op=True)],
            TensorUse([part], [whole]),
        )
        return Pending(whole, work, written=(self.ledger, posted), keep=[part])

    def reduce_scatter(self, full: torch.Tensor, purpose: str, out: torch.Tensor | None = None) -> Pending:
        """Sum `full` [size * n, ...] over the axis and keep this member's [n, ...] along dim 0.

        With `out`, the result is written there; it may be this member's slice of `full`, which then holds the sum while
        the other slices keep this member's own values. Sums are kept in the accumulation dtype on gloo.
        """
        backend = self._backend
        if backend is None:
            return Pending(full if out is None else out)
        assert full.shape[0] % self.size == 0, f"{full.shape[0]} rows cannot be scattered over {self.size} ranks"
        full = full.contiguous()
        posted = self.ledger.post("reduce_scatter", self.name, purpose, full, self.size)
        result, work, finish = backend.reduce_scatter(full, out)
        return Pending(result, work, finish, (self.ledger, posted), keep=[full])

    def all_to_all(self, tensor: torch.Tensor, purpose: str) -> Pending:
        """Send block i of `tensor` [size, ...] to member i. Block i of the result, of the same shape, comes from member i."""
        backend = self._backend
        if backend is None:
            return Pending(tensor)
        assert tensor.shape[0] == self.size, f"{tensor.shape[0]} blocks cannot go to {self.size} ranks, one each"
        blocks = tensor.contiguous()
        posted = self.ledger.post("all_to_all", self.name, purpose, blocks, self.size)
        received = torch.empty_like(blocks)
        work = backend.call(
            lambda seen: [dist.all_to_all_single(seen(received), seen(blocks), group=backend.group, async_op=True)],
            TensorUse([blocks], [received]),
        )
        return Pending(received, work, written=(self.ledger, posted), keep=[blocks])

    def all_to_all_rows(
        self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], purpose: str
    ) -> Pending:
        """Send the next `sent[i]` rows of `tensor` [sum of sent, ...] to member i, which may be none.

        The result has `received[i]` rows from each member in turn; both ends must know their numbers.
        """
        backend = self._backend
        if backend is None:
            return Pending(tensor)
        assert tensor.shape[0] == sum(sent), f"{tensor.shape[0]} rows, of which {sum(sent)} go to some member"
        rows, out = tensor.contiguous(), tensor.new_empty((sum(received), *tensor.shape[1:]))
        elsewhere = (tensor.shape[0] - sent[self.index]) * (tensor[:1].numel() if tensor.shape[0] else 0)
        posted = self.ledger.post("all_to_all_rows", self.name, purpose, rows, self.size, numel=elsewhere)
        work = backend.call(
            lambda seen: [
                dist.all_to_all_single(
                    seen(out), seen(rows), list(received), list(sent), group=backend.group, async_op=True
                )
            ],
            TensorUse([rows], [out]),
        )
        return Pending(out, work, written=(self.ledger, posted), keep=[rows])

    def broadcast(self, tensor: torch.Tensor, source: int, purpose: str) -> Pending:
        """Copy `tensor` from the member `source` into every member's `tensor`."""
        backend = self._backend
        if backend is None:
            return Pending(tensor)
        posted = self.ledger.post("broadcast", self.name, purpose, tensor, self.size)
        work = backend.call(
            lambda seen: [dist.broadcast(seen(tensor), self.ranks[source], group=backend.group, async_op=True)],
            TensorUse([tensor] if source == self.index else [], [] if source == self.index else [tensor]),
        )
        return Pending(tensor, work, written=(self.ledger, posted))

    def exchange(self, messages: Sequence[Message], purpose: str) -> list[Pending]:
        """Post point-to-point messages as one group call; one `Pending` per message, in order."""
        assert self._backend is not None, "a one-rank pipeline hands over locally"
        events = [
            self.ledger.post(message.kind, self.name, purpose, message.tensor, self.size, message.peer, place)
            for place, message in enumerate(messages)
        ]
        works = self._backend.exchange(messages)
        return [
            Pending(message.tensor, work, written=(self.ledger, event))
            for message, work, event in zip(messages, works, events, strict=True)
        ]

    def close(self) -> None:
        """End the backend's thread, if there is one."""
        if self._backend is not None:
            self._backend.close()

    def sum_values(self, values: Sequence[float], device: torch.device, purpose: str) -> list[float]:
        """Sum a short vector over the axis and return it on the host."""
        vector = torch.tensor(values, dtype=AGREEMENT_DTYPE, device=device)
        return [float(value) for value in self.all_reduce(vector, purpose).wait().tolist()]

    def barrier(self, device: torch.device, purpose: str) -> None:
        """Wait until every member is here."""
        self.sum_values([0.0], device, purpose)
