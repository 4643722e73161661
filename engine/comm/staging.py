"""Runs calls on GPU tensors through a backend that reads host memory only.

With gloo, several ranks can share one GPU, which NCCL refuses. A single card can then run a whole layout's kernels, streams and
allocator. A call passes three stages:

    post      a side stream copies the tensors that the call reads to pinned memory
    worker    a thread per process group waits for these copies, then makes the calls in posting order
    wait      the host waits for the backend; written tensors are copied back on the current stream

The worker never waits for a peer, so two process groups cannot block each other. Unlike with NCCL, `wait` blocks the host.

On the CPU, the worker makes the copies itself, as late as a busy GPU would. So code that changes a tensor between post and wait
fails tests on the CPU too.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch

from triaxis.engine.device.pinned_memory import PageLock, PinnedPool, Purpose, page_lock_of

CPU = torch.device("cpu")

PURPOSE = Purpose("messages of ranks that share a GPU", "start fewer ranks on the node")

Seen = Callable[[torch.Tensor], torch.Tensor]
"""Maps a tensor to the one that the backend is given in its place."""


class Work(Protocol):
    """A handle for an asynchronous call, as torch.distributed returns it."""

    def wait(self) -> Any: ...
    def is_completed(self) -> bool: ...


class TensorUse(NamedTuple):
    """The tensors that a call reads and writes for one of its handles. A tensor that is reduced in place is in both lists."""

    read: Sequence[torch.Tensor] = ()
    written: Sequence[torch.Tensor] = ()


class Carrier(Protocol):
    """Interface through which one process group's calls go, instead of directly to torch."""

    def post(self, call: Callable[[Seen], Sequence[Work]], uses: Sequence[TensorUse]) -> list[Work]:
        """Make `call` after all calls that were posted before, and return one handle per use."""
        ...

    def close(self) -> None:
        """Release the carrier's resources, such as a worker thread and host memory."""
        ...


class _Rooms:
    """Host memory for one call's stand-ins, the copies of its tensors.

    The pool gets the memory back after the last handle's wait.
    """

    def __init__(self, pool: PinnedPool, vectors: Sequence[torch.Tensor], num_handles: int) -> None:
        self._pool = pool
        self._vectors = vectors
        self._num_open = num_handles
        self._events: list[torch.cuda.Event] = []
        # Several threads may wait for one call's handles.
        self._guard = threading.Lock()

    def over(self, event: torch.cuda.Event | None) -> None:
        """Note that `wait` has been called on one more handle.

        Args:
            event: end of the copies that this handle's `wait` has started on the stream; None: no copies.
        """
        with self._guard:
            self._events += [] if event is None else [event]
            self._num_open -= 1
            is_last = self._num_open == 0
        if is_last:
            for vector in self._vectors:
                self._pool.give(vector, self._events)


class StagedWork:
    """Handle for a call that `Staging`'s worker thread makes. A group call has one per message."""

    def __init__(
        self,
        posted: Future[Sequence[Work]],
        place: int,
        written: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rooms: _Rooms,
        event: Callable[[], torch.cuda.Event] | None,
    ) -> None:
        self._posted = posted
        self._place = place
        self._written = written
        self._rooms: _Rooms | None = rooms
        self._event = event
        self._future: torch.futures.Future[None] | None = None

    def wait(self) -> None:
        """Wait for the backend, then copy this handle's results from host memory to their tensors.

        The copies run on the current stream. A second wait copies nothing.
        """
        self._posted.result()[self._place].wait()
        rooms, self._rooms = self._rooms, None
        if rooms is None:
            return
        with torch.no_grad():
            for tensor, stand_in in self._written:
                tensor.copy_(stand_in, non_blocking=True)
        rooms.over(self._event() if self._written and self._event is not None else None)
        if self._future is not None:
            self._future.set_result(None)

    def get_future(self) -> "torch.futures.Future[None]":
        """Return a future that completes at the end of `wait`."""
        if self._future is None:
            self._future = torch.futures.Future()
        return self._future

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        if not self._posted.done():
            return False
        return self._posted.exception() is not None or self._posted.result()[self._place].is_completed()


class Staging:
    """`Carrier` whose worker thread makes one process group's calls on host copies of tensors.

    Args:
        page_lock: object that locks the pages of the copies' host memory; None: the default for the device.
    """

    def __init__(self, device: torch.device, page_lock: PageLock | None = None) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")
        self._pool = PinnedPool(page_lock or page_lock_of(device), PURPOSE)
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def post(self, call: Callable[[Seen], Sequence[Work]], uses: Sequence[TensorUse]) -> list[Work]:
        """Make `call` on host copies of its tensors, after all calls that were posted before.

        Args:
            call: function that calls the backend and returns as many handles as there are uses.
            uses: for each handle, the tensors that its call reads and writes. Until the handle's `wait` returns, read tensors must
                not change, and written tensors have no valid values.

        Returns:
            One handle per use.
        """
        tensors = {id(tensor): tensor for use in uses for tensor in (*use.read, *use.written)}
        vectors = {key: self._pool.take(tensor.numel(), tensor.dtype) for key, tensor in tensors.items()}
        stand_ins = {key: vectors[key].view(tensor.shape) for key, tensor in tensors.items()}
        read = {id(tensor): tensor for use in uses for tensor in use.read}
        copies = [(stand_ins[key], tensor) for key, tensor in read.items()]
        ready = self._copying(copies)

        # `call` refers to the tensors, and waits for the copies first: nobody gets the tensors' memory before.
        def make_the_call() -> Sequence[Work]:
            ready()
            works = call(lambda tensor: stand_ins[id(tensor)])
            assert len(works) == len(uses), f"{len(works)} handles for {len(uses)} uses"
            return works

        posted = self._worker.submit(make_the_call)
        rooms = _Rooms(self._pool, list(vectors.values()), len(uses))
        event = None if self._side is None else self._event
        return [
            StagedWork(posted, place, [(tensor, stand_ins[id(tensor)]) for tensor in use.written], rooms, event)
            for place, use in enumerate(uses)
        ]

    def close(self) -> None:
        """Stop the worker and unlock the host memory. Calls that the worker has not made yet are dropped."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._pool.close()

    def _event(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def _copying(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        """Begin to copy each tensor to its stand-in in host memory. Return a function that waits for these copies.

        If there are no streams, as on a CPU, the returned function makes the copies instead.
        """
        if self._side is None:
            return lambda: _copy(copies)
        if not copies:
            return lambda: None
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            _copy(copies)
            done = torch.cuda.Event()
            done.record(self._side)
        return lambda: done.synchronize()


@torch.no_grad()
def _copy(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for stand_in, tensor in copies:
        stand_in.copy_(tensor, non_blocking=True)
