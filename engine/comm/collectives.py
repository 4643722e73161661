"""Posts collectives and messages on one group of ranks.

An `Axis` is one group of ranks. Its verbs, such as `all_reduce`, return a `Pending` (`triaxis.engine.comm.backends`), whose
`wait()` returns the result. Whatever runs between the post and the wait overlaps the call. On a one-rank axis, a verb returns its
input unchanged and calls nothing. Each call is written to the `Ledger` with its purpose.
"""

from collections.abc import Sequence
from copy import copy

import torch
import torch.distributed as dist

from triaxis.engine.comm.backends import Backend, Message, Pending, ReduceOp
from triaxis.engine.comm.ledger import Ledger
from triaxis.engine.comm.staging import Carrier
from triaxis.engine.numerics.precision import AGREEMENT_DTYPE


class Axis:
    """One group of ranks, as this member sees it.

    Verbs name a peer by its index on the axis, not by its global rank. A verb posts and never waits, except `sum_values` and
    `barrier`. The caller chooses where to wait, and thus what runs meanwhile. `out`, where given, receives the result. On a
    one-rank axis nothing is copied to `out`, so `out` must be the input or share its memory.

    Attributes:
        name: axis name ("tp", "dp", "pp_forward", ...), which labels its calls in the ledger.
        ranks: the members' global ranks, in order.
        index: this rank's position in `ranks`.
        size: number of members.

    Args:
        group: process group with these ranks; None for a single rank.
        carrier: object through which the group's calls go (`triaxis.engine.comm.staging`); None: calls go to torch directly.
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
        """Return a copy of this axis with another ledger and the same process group."""
        axis = copy(self)
        axis.ledger = ledger
        return axis

    def connect(self, device: torch.device) -> None:
        """Open the connections now, so that a missing peer shows up at start. All members call this and wait."""
        if self._backend is not None:
            self._backend.connect(device)

    def connect_ring(self, device: torch.device) -> None:
        """Open the connections for messages to and from both ring neighbours. All members call this method."""
        if self._backend is not None:
            self._backend.connect_ring(device, self.index)

    def all_reduce(self, tensor: torch.Tensor, purpose: str, op: ReduceOp = "sum") -> Pending:
        """Reduce `tensor` over the axis, in place."""
        backend = self._backend
        if backend is None:
            return Pending(tensor)
        posted = self.ledger.post("all_reduce", self.name, purpose, tensor, self.size)
        return Pending(tensor, backend.all_reduce(tensor, op), written=(self.ledger, posted))

    def all_gather(self, shard: torch.Tensor, purpose: str, out: torch.Tensor | None = None) -> Pending:
        """Concatenate the members' shards [n, ...] along dim 0 to [size * n, ...].

        If `out` is given, it receives the result; `shard` may be this member's slice of it.
        """
        backend = self._backend
        if backend is None:
            return Pending(shard if out is None else out)
        if out is None:
            out = shard.new_empty((self.size * shard.shape[0], *shard.shape[1:]))
        shard = shard.contiguous()
        posted = self.ledger.post("all_gather", self.name, purpose, shard, self.size)
        return Pending(out, backend.all_gather(out, shard), written=(self.ledger, posted), keep=[shard])

    def reduce_scatter(self, full: torch.Tensor, purpose: str, out: torch.Tensor | None = None) -> Pending:
        """Sum `full` [size * n, ...] over the axis and keep this member's [n, ...] along dim 0.

        If `out` is given, it receives the result. `out` may be this member's slice of `full`. The other slices then keep this
        member's own values. With gloo, sums are computed in the accumulation dtype.
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
        """Send block i of `tensor` [size, ...] to member i.

        The result has the same shape, and its block i comes from member i.
        """
        backend = self._backend
        if backend is None:
            return Pending(tensor)
        assert tensor.shape[0] == self.size, f"{tensor.shape[0]} blocks cannot go to {self.size} ranks, one each"
        blocks = tensor.contiguous()
        posted = self.ledger.post("all_to_all", self.name, purpose, blocks, self.size)
        received = torch.empty_like(blocks)
        return Pending(received, backend.all_to_all(received, blocks), written=(self.ledger, posted), keep=[blocks])

    def all_to_all_rows(
        self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], purpose: str
    ) -> Pending:
        """Send `sent[i]` rows of `tensor` [sum(sent), ...] to each member i.

        Rows lie in member order. The result has `received[i]` rows from each member i, in member order. Sender and receiver must
        both know each row count in advance.
        """
        backend = self._backend
        if backend is None:
            return Pending(tensor)
        assert tensor.shape[0] == sum(sent), f"{tensor.shape[0]} rows, of which {sum(sent)} go to some member"
        rows, out = tensor.contiguous(), tensor.new_empty((sum(received), *tensor.shape[1:]))
        elsewhere = (tensor.shape[0] - sent[self.index]) * (tensor[:1].numel() if tensor.shape[0] else 0)
        posted = self.ledger.post("all_to_all_rows", self.name, purpose, rows, self.size, numel=elsewhere)
        work = backend.all_to_all(out, rows, list(received), list(sent))
        return Pending(out, work, written=(self.ledger, posted), keep=[rows])

    def broadcast(self, tensor: torch.Tensor, source: int, purpose: str) -> Pending:
        """Copy `tensor` from the member `source` into every member's `tensor`."""
        backend = self._backend
        if backend is None:
            return Pending(tensor)
        posted = self.ledger.post("broadcast", self.name, purpose, tensor, self.size)
        work = backend.broadcast(tensor, self.ranks[source], is_source=source == self.index)
        return Pending(tensor, work, written=(self.ledger, posted))

    def exchange(self, messages: Sequence[Message], purpose: str) -> list[Pending]:
        """Post messages as one group call, and return one `Pending` per message, in order. Not for a one-rank axis."""
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
        """Stop the thread that watches gloo's sends, if there is one."""
        if self._backend is not None:
            self._backend.close()

    def sum_values(self, values: Sequence[float], device: torch.device, purpose: str) -> list[float]:
        """Sum a short vector over the axis and return it on the host."""
        vector = torch.tensor(values, dtype=AGREEMENT_DTYPE, device=device)
        return [float(value) for value in self.all_reduce(vector, purpose).wait().tolist()]

    def barrier(self, device: torch.device, purpose: str) -> None:
        """Wait until every member has called this."""
        self.sum_values([0.0], device, purpose)
