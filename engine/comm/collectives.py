"""The only caller of torch.distributed's communication: every collective and every send, labelled and written down.

An `Axis` is one group of ranks as one member sees it. Its verbs return a `Pending`, whose `wait()` gives the result; what
lies between posting and waiting is overlapped. A one-rank axis is the identity and issues no op: this file is the only
place that knows it. Each call is labelled with its purpose, and the `Ledger` writes down what was called, nothing derived:

    post   op, axis, purpose, dtype, numel of the tensor handed in, group size; of a send or receive the peer and the group call
    wait   the same number, when the result was asked for
    mark   a named point of the computation (a weight-gradient GEMM, say), so that order in the ledger proves overlap

Backends differ in six things, and this file is where that is known:
- gloo's tensor reduce-scatter is an all-reduce inside (twice the wire bytes). On gloo the rank chunks are exchanged by
  all-to-all and summed here in rank order, in the accumulation dtype; the order does not depend on how buckets are cut.
- torch 2.13 renamed `reduce_scatter_tensor` and `all_gather_into_tensor` to `*_single`.
- the first p2p call of an NCCL group must involve the whole group, so `Axis.connect` reduces one element beforehand.
- NCCL opens the connection of a pair in the first group call that names it, and holds the host until the peer is in the mirrored
  call; so `Axis.connect_ring` exchanges one element with both ring neighbours, each way.
- gloo cannot say whether a send has completed without waiting for it, so a thread of the axis waits; NCCL can be asked.
- torch's fake backend (a footprint's) has nobody to send to, and its handles say for ever that they are under way.
- gloo reads host memory alone: tensors of a GPU are carried there and back (`engine.comm.staging`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist

from engine.comm.staging import CPU, Carrier, Seen, TensorUse, Work
from engine.numerics.precision import AGREEMENT_DTYPE, accumulate

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "recv"]
ReduceOp = Literal["sum", "max"]

_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

TEXT_BYTES = 4096
"""The most that `Axis.tell` carries per member, and `Axis.announce` in all: a path of a file, or some lines of an error."""


class Event(NamedTuple):
    """One line of the ledger.

    Attributes:
        call: numbers the posted calls of the step; marks carry -1.
        numel: of the tensor handed in.
        peer: the other member of a send or receive (an index on the axis); -1 for a collective.
        group_call: the number of the first call that was posted in the same group call; its own for a collective.
    """

    phase: Literal["post", "wait", "mark"]
    call: int
    op: str
    axis: str
    purpose: str
    dtype: torch.dtype | None
    numel: int
    group_size: int
    peer: int = -1
    group_call: int = -1


class WaitClock(Protocol):
    """Who measures how long a rank stands still for its calls (`engine.telemetry.timing.marks`)."""

    def wait_begins(self, posted: Event) -> None: ...
    def wait_ends(self) -> None: ...


class Ledger:
    """What one rank called since the last reset, in order.

    Attributes:
        clock: told when the rank begins to wait for a call and when it goes on; None: nobody measures.
    """

    def __init__(self) -> None:
        self.clock: WaitClock | None = None
        self.events: list[Event] = []
        self._num_calls = 0

    def reset(self) -> None:
        self.events = []
        self._num_calls = 0

    def post(
        self, op: Op, axis: str, purpose: str, tensor: torch.Tensor, group_size: int, peer: int = -1, place: int = 0
    ) -> Event:
        """Write down a call; `place` is its place in its group call."""
        call = self._num_calls
        event = Event("post", call, op, axis, purpose, tensor.dtype, tensor.numel(), group_size, peer, call - place)
        self._num_calls += 1
        self.events.append(event)
        return event

    def wait_begins(self, posted: Event) -> None:
        if self.clock is not None:
            self.clock.wait_begins(posted)

    def wait_ends(self, posted: Event) -> None:
        self.events.append(posted._replace(phase="wait"))
        if self.clock is not None:
            self.clock.wait_ends()

    def mark(self, op: str, purpose: str) -> None:
        self.events.append(Event("mark", -1, op, "", purpose, None, 0, 0))

    @property
    def posted(self) -> list[Event]:
        return [event for event in self.events if event.phase == "post"]


class _WatchedSend:
    """A gloo send that a thread waits for, so that its completion can be seen without blocking."""

    def __init__(self, watcher: ThreadPoolExecutor, work: Work) -> None:
        self._done: Future[Any] = watcher.submit(work.wait)

    def wait(self) -> None:
        self._done.result()

    def is_completed(self) -> bool:
        return self._done.done()


class _TakenSend:
    """A send of the fake backend: nobody takes it, so it counts as taken at once."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class Pending:
    """A call under way. It keeps its tensors alive until `wait()`, which may be called again and again."""

    def __init__(
        self,
        result: torch.Tensor,
        work: Sequence["Work"] = (),
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

    def wait(self) -> torch.Tensor:
        """The result. With NCCL the current stream waits, not the host."""
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
        """Whether `wait()` would return at once (never blocks)."""
        return self._done or all(work.is_completed() for work in self._work)


@dataclass(frozen=True, slots=True)
class Message:
    """One tensor to send to, or receive from, the member `peer` (an index on the axis)."""

    kind: Literal["send", "recv"]
    tensor: torch.Tensor
    peer: int


class Axis:
    """One group of ranks, as this member sees it.

    Attributes:
        name: the axis ("tp", "dp", "pp_forward", ...): how the ledger labels its calls.
        ranks: global ranks of the members, in order.
        index: which member this rank is.
        size: number of members.

    Args:
        rank: this rank.
        group: of the ranks; None for a group of one.
        ledger: what is called is written down there.
        carrier: of the group, where somebody else makes its calls (`engine.comm.staging`).
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
        self._group = group
        self._carrier = carrier
        self._is_gloo = group is not None and dist.get_backend(group) == "gloo"
        self._is_fake = group is not None and dist.get_backend(group) == "fake"
        self._is_nccl = group is not None and dist.get_backend(group) == "nccl"
        self._watcher: ThreadPoolExecutor | None = None

    def connect(self, device: torch.device) -> None:
        """Open the connections now, so that a missing peer shows at start and not in the first step."""
        if self._group is not None:
            dist.all_reduce(torch.zeros(1, device=CPU if self._is_gloo else device), group=self._group)
            self._synchronize(device)

    def connect_ring(self, device: torch.device) -> None:
        """Open the point-to-point connections to both ring neighbours, each way, in one group call.

        All members call it, with no message under way. The call is mirrored: each pair opens the same connections at both ends.
        With two members the neighbours are one peer, which is named twice, in the same order on both.
        """
        if self._group is None:
            return
        following, preceding = ((self.index + step) % self.size for step in (1, -1))
        ends = [("send", following), ("recv", preceding), ("send", preceding), ("recv", following)]
        elements = torch.zeros(len(ends), 1, device=CPU if self._is_gloo else device)
        functions = {"send": dist.isend, "recv": dist.irecv}
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(functions[kind], element, self.ranks[peer], self._group)
                for (kind, peer), element in zip(ends, elements.unbind(), strict=True)
            ]
        )
        # A send of the fake backend never ends, because nobody takes it.
        for work in () if self._is_fake else works:
            work.wait()
        self._synchronize(device)

    def _synchronize(self, device: torch.device) -> None:
        """Wait until the device has done what was posted; other backends have, when their calls return."""
        if self._is_nccl:
            torch.cuda.synchronize(device)

    def _call(self, call: Callable[[Seen], Sequence[Any]], *uses: TensorUse) -> list[Work]:
        """Make a call of the backend; `call` is given what the backend sees of a tensor, and returns a handle for each use."""
        if self._carrier is not None:
            return self._carrier.post(call, uses)
        return [_work(work) for work in call(lambda tensor: tensor)]

    def all_reduce(self, tensor: torch.Tensor, purpose: str, op: ReduceOp = "sum") -> Pending:
        """Reduce `tensor` over the axis, in place."""
        if self._group is None:
            return Pending(tensor)
        posted = self.ledger.post("all_reduce", self.name, purpose, tensor, self.size)
        work = self._call(
            lambda seen: [dist.all_reduce(seen(tensor), _REDUCE_OPS[op], group=self._group, async_op=True)],
            TensorUse([tensor], [tensor]),
        )
        return Pending(tensor, work, written=(self.ledger, posted))

    def all_gather(self, shard: torch.Tensor, purpose: str, out: torch.Tensor | None = None) -> Pending:
        """Concatenate the members' shards [n, ...] along dim 0 to [size * n, ...].

        With `out`, the result is written there; `shard` may be this member's slice of it.
        """
        if self._group is None:
            return Pending(shard if out is None else out)
        if out is None:
            out = shard.new_empty((self.size * shard.shape[0], *shard.shape[1:]))
        shard = shard.contiguous()
        posted = self.ledger.post("all_gather", self.name, purpose, shard, self.size)
        whole, part = out, shard
        work = self._call(
            lambda seen: [_ALL_GATHER(seen(whole), seen(part), group=self._group, async_op=True)],
            TensorUse([part], [whole]),
        )
        return Pending(whole, work, written=(self.ledger, posted), keep=[part])

    def reduce_scatter(self, full: torch.Tensor, purpose: str, out: torch.Tensor | None = None) -> Pending:
        """Sum `full` [size * n, ...] over the axis and keep this member's [n, ...] along dim 0.

        With `out`, the result is written there; it may be this member's slice of `full`, which then holds the sum while
        the other slices keep this member's own values. Sums are kept in the accumulation dtype on gloo.
        """
        if self._group is None:
            return Pending(full if out is None else out)
        assert full.shape[0] % self.size == 0, f"{full.shape[0]} rows cannot be scattered over {self.size} ranks"
        full = full.contiguous()
        shape = (full.shape[0] // self.size, *full.shape[1:])
        posted = self.ledger.post("reduce_scatter", self.name, purpose, full, self.size)
        if not self._is_gloo:
            shard = full.new_empty(shape) if out is None else out
            work = self._call(
                lambda seen: [_REDUCE_SCATTER(seen(shard), seen(full), group=self._group, async_op=True)],
                TensorUse([full], [shard]),
            )
            return Pending(shard, work, written=(self.ledger, posted), keep=[full])

        chunks = torch.empty_like(full)
        work = self._call(
            lambda seen: [dist.all_to_all_single(seen(chunks), seen(full), group=self._group, async_op=True)],
            TensorUse([full], [chunks]),
        )

        def sum_in_rank_order() -> torch.Tensor:
            first, second, *rest = chunks.view(self.size, *shape).unbind()
            total = torch.add(accumulate(first), second, out=out)
            for part in rest:
                total += part
            return total.to(full.dtype)

        return Pending(full, work, sum_in_rank_order, (self.ledger, posted), keep=[full])

    def broadcast(self, tensor: torch.Tensor, source: int, purpose: str) -> Pending:
        """Copy `tensor` from the member `source` into every member's `tensor`."""
        if self._group is None:
            return Pending(tensor)
        posted = self.ledger.post("broadcast", self.name, purpose, tensor, self.size)
        work = self._call(
            lambda seen: [dist.broadcast(seen(tensor), self.ranks[source], group=self._group, async_op=True)],
            TensorUse([tensor] if source == self.index else [], [] if source == self.index else [tensor]),
        )
        return Pending(tensor, work, written=(self.ledger, posted))

    def exchange(self, messages: Sequence[Message], purpose: str) -> list[Pending]:
        """Post point-to-point messages as one group call; one `Pending` per message, in order."""
        assert self._group is not None, "a one-rank pipeline hands over locally"
        functions = {"send": dist.isend, "recv": dist.irecv}

        def post_the_group(seen: Seen) -> Sequence[Any]:
            return dist.batch_isend_irecv(
                [
                    dist.P2POp(functions[message.kind], seen(message.tensor), self.ranks[message.peer], self._group)
                    for message in messages
                ]
            )

        events = [
            self.ledger.post(message.kind, self.name, purpose, message.tensor, self.size, message.peer, place)
            for place, message in enumerate(messages)
        ]
        uses = [TensorUse([one.tensor]) if one.kind == "send" else TensorUse((), [one.tensor]) for one in messages]
        works = self._call(post_the_group, *uses)
        if self._is_fake and self._carrier is None:
            works = [
                _TakenSend() if message.kind == "send" else work for message, work in zip(messages, works, strict=True)
            ]
        if self._is_gloo:
            works = [
                _WatchedSend(self._send_watcher(), work) if message.kind == "send" else work
                for message, work in zip(messages, works, strict=True)
            ]
        # A backend that coalesces returns one handle for the whole group call, another returns one per message.
        per_message = [works] * len(messages) if len(works) != len(messages) else [[work] for work in works]
        return [
            Pending(message.tensor, work, written=(self.ledger, event))
            for message, work, event in zip(messages, per_message, events, strict=True)
        ]

    def _send_watcher(self) -> ThreadPoolExecutor:
        if self._watcher is None:
            self._watcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{self.name}-sends")
        return self._watcher

    def close(self) -> None:
        """Let go of the thread that watches sends, if there is one."""
        if self._watcher is not None:
            self._watcher.shutdown(wait=False, cancel_futures=True)
            self._watcher = None

    def agree(self, values: Sequence[float], device: torch.device, purpose: str) -> list[float]:
        """Sum a short vector over the axis and return it on the host: the step's one small all-reduce."""
        vector = torch.tensor(values, dtype=AGREEMENT_DTYPE, device=device)
        return [float(value) for value in self.all_reduce(vector, purpose).wait().tolist()]

    def tell(self, text: str, device: torch.device, purpose: str) -> list[str]:
        """Gather every member's short text, in rank order: reasons of errors, say. No pickle is involved.

        The members agree on the longest text first, so that a round in which all texts are empty costs one number per member.
        Longer texts are cut to `TEXT_BYTES` of UTF-8.
        """
        content = text.encode()[:TEXT_BYTES]
        length = torch.tensor([len(content)], dtype=AGREEMENT_DTYPE, device=device)
        longest = int(self.all_reduce(length, purpose, op="max").wait().item())
        if not longest:
            return [""] * self.size
        everybody = self.all_gather(_bytes_to(content.ljust(longest, b"\0"), device), purpose).wait()
        flat = everybody.cpu().numpy().tobytes()
        return [_text(flat[start : start + longest]) for start in range(0, len(flat), longest)]

    def announce(self, text: str, device: torch.device, purpose: str) -> str:
        """Return the first member's text on every member; the others' texts are ignored.

        A text that is longer than `TEXT_BYTES` of UTF-8 is cut.
        """
        content = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        return _text(self.broadcast(_bytes_to(content, device), 0, purpose).wait().cpu().numpy().tobytes())


def _bytes_to(content: bytes, device: torch.device) -> torch.Tensor:
    """uint8 [len(content)] on a device."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def _text(content: bytes) -> str:
    """Decode what `tell` and `announce` have padded with zeros."""
    return content.rstrip(b"\0").decode(errors="ignore")


def _work(work: Any) -> dist.Work:
    assert work is not None, "an asynchronous call on a group of this rank returns a handle"
    return work
