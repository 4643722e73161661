"""Records one rank's communication calls, waits and marks since the last reset, in order.

    post   a call, with its op, axis, purpose, and the dtype and size of its input
    wait   the return of the wait for a call
    mark   a named point in the computation; its place between a post and a wait proves that they overlap

A host read of device values is a mark too. The ledger derives nothing from a call, such as wire bytes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_rows", "broadcast", "send", "recv"]

REPLICA_GRADIENTS = "replica gradients"
"""Purpose of a gradient sum over the ranks that hold its parameter and each computed a part
(`triaxis.engine.layout.shard_spec`).
"""

CROSS_ENTROPY, QK_NORM, FP8_SCALES = "cross-entropy", "qk-norm", "fp8 scale"
"""First words in the purposes of reductions: the cross-entropy's, QK-norm's over all heads, and those for fp8 scales."""

KEYS_AND_VALUES, HEADS = "keys and values", "heads"
"""First words in context parallelism's purposes: its gathers and their gradient sums; its exchanges."""

EXPERTS = "experts"
"""First word in the purposes that concern experts: dispatched tokens, their chosen experts, and expert load."""

LABELS = "labels"
"""Purpose of the sum over the world's counted labels, by which a step's backward divides."""

ATTENTION_MARK = "attention"
"""Mark for an attention call over gathered keys and values."""

HOST_READ = "host_read"
"""Mark for a host read of device values, during which the host waits for the device."""

NO_PEER = -1
"""Value of `Event.peer` for a collective."""


class Event(NamedTuple):
    """One line in the ledger.

    Attributes:
        call: index of the call since the ledger's last reset; -1 for a mark (see the module).
        dtype: the input tensor's torch dtype; None for a mark.
        numel: the input tensor's number of elements; for `all_to_all_rows`, only those that go to other members.
        peer: the other member in a send or receive (an index on the axis); NO_PEER for a collective.
        group_call: for a send or receive, index of the first call in the same `Axis.exchange`; for a collective its own index.
    """

    phase: Literal["post", "wait", "mark"]
    call: int
    op: str
    axis: str
    purpose: str
    dtype: Any
    numel: int
    group_size: int
    peer: int = NO_PEER
    group_call: int = -1


class WaitObserver(Protocol):
    """Observer of a rank's calls, waits and host reads.

    `posted` is the ledger's `Event` for a call, and `handles` are the backend's handles for that call. `mark` is the ledger's
    `Event` for a host read.
    """

    def under_way(self, posted: Event, handles: Sequence[Any]) -> None: ...
    def wait_begins(self, posted: Event) -> None: ...
    def wait_ends(self) -> None: ...
    def read_begins(self, mark: Event) -> None: ...
    def read_ends(self) -> None: ...


class Ledger:
    """The record of one rank's calls, waits and marks (named points in the computation).

    Args:
        observers: objects to notify, in this order, of calls, waits and host reads (one kind of mark).

    Attributes:
        num_calls: number of calls since the last reset.
    """

    def __init__(self, observers: Sequence[WaitObserver] = ()) -> None:
        self.observers = list(observers)
        self.events: list[Event] = []
        self.num_calls = 0

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Notify no observer of what is written in this `with` block, as while a CUDA graph is recorded."""
        all_observers = self.observers[:]
        self.observers.clear()
        try:
            yield
        finally:
            self.observers.extend(all_observers)

    def reset(self) -> None:
        """Delete all events and number calls from 0 again."""
        self.events = []
        self.num_calls = 0

    def post(
        self,
        op: Op,
        axis: str,
        purpose: str,
        tensor: Any,
        group_size: int,
        peer: int = NO_PEER,
        place: int = 0,
        numel: int | None = None,
    ) -> Event:
        """Record a call and return its event.

        Args:
            tensor: the call's input tensor.
            place: the call's index within its group call.
            numel: number of elements to record; None: the tensor's own.
        """
        call = self.num_calls
        numel = tensor.numel() if numel is None else numel
        event = Event("post", call, op, axis, purpose, tensor.dtype, numel, group_size, peer, call - place)
        self.num_calls += 1
        self.events.append(event)
        return event

    def wait_ends(self, posted: Event) -> None:
        """Record that the wait for a call's result has returned, and tell the observers."""
        self.events.append(posted._replace(phase="wait"))
        for observer in self.observers:
            observer.wait_ends()

    def mark(self, op: str, purpose: str) -> None:
        """Record that the computation has reached the point named `op`; `purpose` tells points with one name apart."""
        self.events.append(_mark(op, purpose))

    @contextmanager
    def host_read(self, purpose: str) -> Iterator[None]:
        """Record that this `with` block reads device values on the host, and tell the observers its begin and end."""
        mark = _mark(HOST_READ, purpose)
        self.events.append(mark)
        for observer in self.observers:
            observer.read_begins(mark)
        yield
        for observer in self.observers:
            observer.read_ends()

    @property
    def posted(self) -> list[Event]:
        """The calls, in the order of their posts."""
        return [event for event in self.events if event.phase == "post"]


def _mark(op: str, purpose: str) -> Event:
    return Event("mark", -1, op, "", purpose, None, 0, 0)
