"""Replace the streams of a GPU run by stand-ins that report to a `RaceWatch`.

    CommunicatorStream   a communicator's stream in NCCL
    WatchedCuda          streams and events for the engine's own copies between GPU and host
    WatchedStaging       copies through host memory for gloo between GPUs
    ReadingThread        the thread that writes checkpoints
    HostReads            Python code that reads values

Each stand-in replaces an engine object through an argument or attribute that the engine provides.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from triaxis.engine.comm.ledger import Event, Ledger
from triaxis.engine.comm.staging import CPU, Seen, Staging, TensorUse, Work
from triaxis.engine.device.host_copy import FromCuda
from triaxis.launch.footprint.races.clocks import Stream, VectorClock
from triaxis.launch.footprint.races.watch import RaceWatch

HOST_READS = (torch.Tensor.tolist, torch.Tensor.numpy)
"""Functions that read values on the host and dispatch no operator."""


class CommunicatorStream:
    """A `triaxis.engine.comm.staging.Carrier` that sends nothing, and posts calls on a watched stream.

    NCCL's stream waits for an event on the current stream when a call is posted. The handle's `wait` makes the current stream wait
    for the call's end. The engine must keep the call's tensors, since the handle does not.
    """

    def __init__(self, watch: RaceWatch, name: str, ledger: Ledger) -> None:
        self._watch = watch
        self._ledger = ledger
        self._stream = watch.stream(f"the {name} communicator's stream")

    def post(self, call: Callable[[Seen], Sequence[Work]], uses: Sequence[TensorUse]) -> list[Work]:
        """Post the ledger's last calls, one per use, as one operator on the watched stream. `call` is not run."""
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
        """Do nothing: there is nothing to release."""


def _written(event: Event, use: TensorUse) -> Sequence[torch.Tensor]:
    """Return the tensors that a call writes.

    An in-place all-gather leaves the member's own slice as it is (NCCL, "In-place Operations").
    """
    if event.op != "all_gather":
        return use.written
    (whole,), (part,) = use.written, use.read
    if part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return use.written
    flat, start = whole.view(-1), part.storage_offset() - whole.storage_offset()
    return [flat[:start], flat[start + part.numel() :]]


class _CommunicatorWork:
    """The handle for a call on a communicator's stream."""

    def __init__(self, watch: RaceWatch, mark: VectorClock) -> None:
        self._watch = watch
        self._mark = mark

    def wait(self) -> None:
        self._watch.clocks.wait(self._watch.current, self._mark)

    def is_completed(self) -> bool:
        """Whether the call has ended. If so, the host is now ordered after the call."""
        if self._watch.sends_end:
            self._watch.clocks.wait(self._watch.thread, self._mark)
        return self._watch.sends_end


class WatchedCuda:
    """Stand-ins for the `torch.cuda` streams and events that the engine uses. They report to a `RaceWatch`.

    Args:
        watch: race detector that learns from the streams and events which operators are ordered.
        name: name of the created streams, for reports.
    """

    def __init__(self, watch: RaceWatch, name: str) -> None:
        self._watch = watch
        self._name = name

    def Stream(self, device: torch.device) -> "_WatchedStream":  # noqa: N802
        return _WatchedStream(self._watch, self._watch.stream(self._name))

    def Event(self) -> "_WatchedEvent":  # noqa: N802
        return _WatchedEvent(self._watch)

    def current_stream(self, device: torch.device) -> "_WatchedStream":
        return _WatchedStream(self._watch, self._watch.current)

    def stream(self, stream: "_WatchedStream") -> AbstractContextManager[None]:
        return self._watch.on(stream.of)


@dataclass(frozen=True, slots=True)
class _WatchedStream:
    """A stand-in for `torch.cuda.Stream`. `of` is the stream on which race detector `watch` counts its operators."""

    watch: RaceWatch
    of: Stream

    def wait_stream(self, other: "_WatchedStream") -> None:
        self.watch.clocks.wait(self.of, self.watch.clocks.record(other.of))

    def wait_event(self, event: "_WatchedEvent") -> None:
        self.watch.clocks.wait(self.of, event.mark)

    def record_event(self) -> "_WatchedEvent":
        event = _WatchedEvent(self.watch)
        event.record(self)
        return event


class _WatchedEvent:
    """A stand-in for `torch.cuda.Event`. An event that was not recorded blocks no stream, as in CUDA."""

    def __init__(self, watch: RaceWatch) -> None:
        self._watch = watch
        self.mark: VectorClock = {}

    def record(self, stream: _WatchedStream | None = None) -> None:
        self.mark = self._watch.clocks.record(self._watch.current if stream is None else stream.of)

    def synchronize(self) -> None:
        self._watch.clocks.wait(self._watch.thread, self.mark)

    def query(self) -> bool:
        """Whether the event is reached. If so, the thread is now ordered after the event."""
        if self._watch.sends_end:
            self.synchronize()
        return self._watch.sends_end


class WatchedFromCuda(FromCuda):
    """The engine's copies from GPU to host memory, reported to the race detector `watch`.

    Attributes:
        copied: destinations of the last copies.
    """

    def __init__(self, watch: RaceWatch) -> None:
        super().__init__(WatchedCuda(watch, ""))
        self._watch = watch
        self.copied: list[torch.Tensor] = []

    def post(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        pairs = list(copies)
        self.copied = [destination for destination, _ in pairs]
        return super().post(pairs)

    def room(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._watch.host_memory():
            return torch.empty(tensor.shape, dtype=tensor.dtype)


class WatchedPageLock:
    """A stand-in for `triaxis.engine.device.pinned_memory.PageLock`. Locked memory counts as host memory."""

    def __init__(self, watch: RaceWatch) -> None:
        self._watch = watch

    def lock(self, memory: torch.Tensor) -> None:
        self._watch.is_host_memory(memory)

    def unlock(self, memory: torch.Tensor) -> None:
        """Do nothing. Memory is unlocked only after the watched training steps, where no race is sought."""


class WatchedStaging(Staging):
    """A stand-in for a GPU rank's `Staging`, which copies a process group's tensors for gloo.

    The race detector `watch` treats the copying thread as one more stream.
    """

    def __init__(self, watch: RaceWatch, name: str) -> None:
        self._watch = watch
        cuda = WatchedCuda(watch, f"the {name} staging stream")
        worker = _Worker(watch, watch.stream(f"the {name} staging thread"))
        super().__init__(CPU, WatchedPageLock(watch), cuda, worker)

    def _lend(self, tensor: torch.Tensor) -> None:
        assert self._side is not None
        self._watch.lend(tensor, self._side.of)


class _Worker(Executor):
    """A thread that runs calls in order. The calls' waits block this thread and not the host."""

    def __init__(self, watch: RaceWatch, thread: Stream) -> None:
        self._watch = watch
        self._thread = thread

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the function at once, as work of the simulated thread.

        The future has one handle for each call that the function made. The caller waits on these handles.
        """
        watch = self._watch
        with watch.as_thread(self._thread):
            works = function(*args, **kwargs)
        mark = watch.clocks.record(self._thread)
        done: Future[Any] = Future()
        done.set_result([_WorkerHandle(watch, mark) for _ in works])
        return done


class _WorkerHandle:
    """The handle for a call over gloo, whose `wait` blocks the calling thread."""

    def __init__(self, watch: RaceWatch, mark: VectorClock) -> None:
        self._watch = watch
        self._mark = mark

    def wait(self) -> None:
        self._watch.clocks.wait(self._watch.thread, self._mark)

    def is_completed(self) -> bool:
        if self._watch.sends_end:
            self.wait()
        return self._watch.sends_end


class ReadingThread(Executor):
    """A stand-in for the checkpoint writer's thread. It reads the latest copies in host memory, and writes no file."""

    def __init__(self, watch: RaceWatch, copies: WatchedFromCuda) -> None:
        self._watch = watch
        self._copies = copies

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        for tensor in self._copies.copied:
            self._watch.read_on_host(tensor)
        return Future()


class HostReads(TorchFunctionMode):
    """A mode that reports each value that the host reads to the watch."""

    def __init__(self, watch: RaceWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_READS:
            self._watch.read_on_host(args[0])
        return func(*args, **(kwargs or {}))
