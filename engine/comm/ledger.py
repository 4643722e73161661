"""The ledger: what one rank called since its last reset, in order.

    post   op, axis, purpose, dtype, numel of the tensor handed in, group size; of a send or receive the peer and the group call
    wait   the same number, when the result was asked for
    mark   a named point of the computation (attention to a gathered piece, say), so that order in the ledger proves overlap; and
           a read of numbers by the host, which observers follow from its beginning to its end

A call is written down as it was made, with nothing derived from it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_rows", "broadcast", "send", "recv"]

REPLICA_GRADIENTS = "replica gradients"
"""Purpose of the sum of a gradient over the ranks that hold its parameter and each saw a part
(`triaxis.engine.layout.shard_spec`)."""

CROSS_ENTROPY, QK_NORM, FP8_SCALES = "cross-entropy", "qk-norm", "fp8 scale"
"""First words of the purposes of the cross-entropy's reductions, and of those of QK-norm over all heads."""

KEYS_AND_VALUES, HEADS = "keys and values", "heads"
"""First words of the purposes of context parallelism's gathers, and of the sums of their gradients; and of its exchanges."""

EXPERTS = "experts"
"""First word of the purposes of what tokens, their experts and the load of experts send."""

LABELS = "labels"
"""Purpose of the sum of counted labels over the world, which a step's backward divides by."""

ATTENTION_MARK = "attention"
"""Mark of an attention call over gathered keys and values."""

HOST_READ = "host_read"
"""Mark of a read of numbers by the host, which waits for the device."""

NO_PEER = -1
"""In place of the peer of a collective."""


class Event(NamedTuple):
    """One line of the ledger.

    Attributes:
        call: numbers the posted calls of the step; marks carry -1.
        dtype: torch's, of the tensor handed in; None for a mark.
        numel: of the tensor handed in; of `all_to_all_rows`, of what goes to other members.
        peer: the other member of a send or receive (an index on the axis); NO_PEER for a collective.
        group_call: the number of the first call that was posted in the same group call; its own for a collective.
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
    """A follower of a rank's calls, of its waits for them, and of reads by its host.

    `handles` are the backend's (`triaxis.engine.comm.staging.Work`), and `mark` is the read's line of the ledger.
    """

    def under_way(self, posted: Event, handles: Sequence[Any]) -> None: ...
    def wait_begins(self, posted: Event) -> None: ...
    def wait_ends(self) -> None: ...
    def read_begins(self, mark: Event) -> None: ...
    def read_ends(self) -> None: ...


class Ledger:
    """The calls of one rank; `observers` follow them and its waits, each in turn."""

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
        """Write down a call with a tensor; `place` is its place in its group call, `numel` another count than the tensor's."""
        call = self._num_calls
        numel = tensor.numel() if numel is None else numel
        event = Event("post", call, op, axis, purpose, tensor.dtype, numel, group_size, peer, call - place)
        self._num_calls += 1
        self.events.append(event)
        return event

    def wait_ends(self, posted: Event) -> None:
        """Write down that the rank has the result of a call."""
        self.events.append(posted._replace(phase="wait"))
        for observer in self.observers:
            observer.wait_ends()

    def mark(self, op: str, purpose: str) -> None:
        """Write down a point of the computation."""
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
        """Return the calls in the order of their posts."""
        return [event for event in self.events if event.phase == "post"]


def _mark(op: str, purpose: str) -> Event:
    return Event("mark", -1, op, "", purpose, None, 0, 0)
