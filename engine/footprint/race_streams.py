"""Stand-ins for the streams of a GPU run beside the computation, for `RaceWatch`.

    CommunicatorStream   NCCL: a call begins after what the current stream was given before; `wait` holds up the current stream
    CopyStream           offload: copies on a stream of their own, with an event in front and one behind
    CopiesToHost         a step's numbers and checkpoints: copies on the current stream, and an event that the host waits for
    ReadingThread        the thread that writes checkpoints
    HostReads            Python that looks at values

Each takes the place of the engine's own object through an argument or attribute that the engine has for it.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from engine.collectives import Event, Ledger
from engine.footprint.clocks import VectorClock
from engine.footprint.races import RaceWatch
from engine.staging import Seen, Use, Work

HOST_READS = (torch.Tensor.tolist, torch.Tensor.numpy)
"""Functions that read values on the host without an operator."""


class CommunicatorStream:
    """The stream of a process group's communicator; a carrier (`engine.staging.Carrier`) that sends nothing.

    NCCL's stream waits for an event of the current stream when a call is posted. The handle's `wait` makes the stream that is
    current by then wait for the end of the call. A group call is one operator. The handle keeps no tensor: the engine must.
    """

    def __init__(self, watch: RaceWatch, name: str, ledger: Ledger) -> None:
        self._watch = watch
        self._ledger = ledger
        self._stream = watch.stream(f"the {name} communicator's stream")

    def post(self, call: Callable[[Seen], Sequence[Work]], uses: Sequence[Use]) -> list[Work]:
        """Post the call that the ledger has written down last, as one operator."""
        watch, stream = self._watch, self._stream
        watch.clocks.wait(stream, watch.clocks.record(watch.current))
        events = self._ledger.events[-len(uses) :]
        ops = " + ".join(event.op.replace("_", "-") for event in events)
        read = [tensor for use in uses for tensor in use.read]
        written = [tensor for event, use in zip(events, uses, strict=True) for tensor in _written(event, use)]
        watch.post(stream, f"{ops} ({events[0].axis}, {events[0].purpose})", read, written)
        mark = watch.clocks.record(stream)
        return [_CommunicatorWork(watch, mark) for _ in uses]

    def close(self) -> None:
        """Hold nothing."""


def _written(event: Event, use: Use) -> Sequence[torch.Tensor]:
    """Return what a call writes. An all-gather in place leaves the member's own slice as it is (NCCL, "In-place Operations")."""
    if event.op != "all_gather":
        return use.written
    (whole,), (part,) = use.written, use.read
    if part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return use.written
    flat, start = whole.view(-1), part.storage_offset() - whole.storage_offset()
    return [flat[:start], flat[start + part.numel() :]]


class _CommunicatorWork:
    """The handle of a call on a communicator's stream."""

    def __init__(self, watch: RaceWatch, mark: VectorClock) -> None:
        self._watch = watch
        self._mark = mark

    def wait(self) -> None:
        self._watch.clocks.wait(self._watch.current, self._mark)

    def is_completed(self) -> bool:
        """Tell whether the call has ended; the host then comes after it."""
        if self._watch.sends_end:
            self._watch.clocks.wait(self._watch.clocks.host, self._mark)
        return self._watch.sends_end


class CopyStream:
    """A stream for copies beside the computation; a lane (`engine.host_memory.CopyLane`)."""

    def __init__(self, watch: RaceWatch, name: str) -> None:
        self._watch = watch
        self._stream = watch.stream(name)

    def post(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> VectorClock:
        clocks = self._watch.clocks
        clocks.wait(self._stream, clocks.record(self._watch.current))
        with self._watch.on(self._stream):
            for destination, source in copies:
                destination.copy_(source)
        return clocks.record(self._stream)

    def wait(self, mark: VectorClock) -> None:
        self._watch.clocks.wait(self._watch.current, mark)


class CopiesToHost:
    """Copies to host memory on the current stream, for which the host waits by an event (`engine.transfers.ToHost`)."""

    def __init__(self, watch: RaceWatch) -> None:
        self._watch = watch

    def room(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._watch.host_memory():
            return torch.empty(tensor.shape, dtype=tensor.dtype)

    def post(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> VectorClock:
        for destination, source in copies:
            destination.copy_(source)
        return self._watch.clocks.record(self._watch.current)

    def finish(self, mark: VectorClock) -> None:
        self._watch.clocks.wait(self._watch.clocks.host, mark)


class ReadingThread(Executor):
    """The thread of a checkpoint's writer, which reads all tensors that it is given and writes nothing."""

    def __init__(self, watch: RaceWatch) -> None:
        self._watch = watch

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        for value in tree_iter(args):
            if isinstance(value, torch.Tensor):
                self._watch.read_on_host(value)
        return Future()


class HostReads(TorchFunctionMode):
    """Tells the watch of values that the host reads, while it is entered."""

    def __init__(self, watch: RaceWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_READS:
            self._watch.read_on_host(args[0])
        return func(*args, **(kwargs or {}))
