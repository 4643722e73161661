"""The ledger: what one rank called since its last reset, in order.

    post   op, axis, purpose, the input tensor's dtype and numel, group size; for a send or receive also the peer and the group call
    wait   the same call number, written when the wait for the result returns
    mark   a named point in the computation (attention to a gathered piece, say), so that order in the ledger proves overlap; also
           a host read of device values, which observers follow from beginning to end

A call is recorded as it was made, with nothing derived from it.
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
        call: number of the call within the step; marks carry -1.
        dtype: the input tensor's torch dtype; None for a mark.
        numel: the input tensor's number of elements; for `all_to_all_rows`, only those that go to other members.
        peer: the other member in a send or receive (an index on the axis); NO_PEER for a collective.
        group_call: number of the first call in the same group call; a collective carries its own number.
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
    """An observer that follows a rank's calls, its waits for them, and its host reads.

    `handles` are the backend's (`triaxis.engine.comm.staging.Work`), and `mark` is the read's event.
    """

    def under_way(self, posted: Event, handles: Sequence[Any]) -> None: ...
    def wait_begins(self, posted: Event) -> None: ...
    def wait_ends(self) -> None: ...
    def read_begins(self, mark: Event) -> None: ...
    def read_ends(self) -> None: ...


class Ledger:
    """One rank's calls; each of the `observers` in turn follows them and the rank's waits."""

    def __init__(self, observers: Sequence[WaitObserver] = ()) -> None:
        self.observers = tuple(observers)
        self.events: list[Event] = []
        self._num_calls = 0

    def reset(self) -> None:
        """Begin a new step."""
        self.events = []
        self._num_calls = 0

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
        """Record a call with a tensor. `place` is its place in its group call; a given `numel` replaces the tensor's own count."""
        call = self._num_calls
        numel = tensor.numel() if numel is None else numel
        event = Event("post", call, op, axis, purpose, tensor.dtype, numel, group_size, peer, call - place)
        self._num_calls += 1
        self.events.append(event)
        return event

    def wait_ends(self, posted: Event) -> None:
        """Record that the wait for a call's result has returned."""
        self.events.append(posted._replace(phase="wait"))
        for observer in self.observers:
            observer.wait_ends()

    def mark(self, op: str, purpose: str) -> None:
        """Record a named point in the computation."""
        self.events.append(_mark(op, purpose))

    @contextmanager
    def host_read(self, purpose: str) -> Iterator[None]:
        """Record that the host reads device values inside this `with` block, where it waits until the device has them."""
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
