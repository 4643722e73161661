"""Activations on their way to host memory and back, beside the computation.

    device   | layer 0 | layer 1       | layer 2 ...      backward: | layer 2       | layer 1       | layer 0 |
    copies             | 0 -> host     | 1 -> host                  | host -> 1     | host -> 0     |

On a GPU copies run on a stream of their own: it waits for what was posted before them, and the computation waits for it where
it says so, the host never. All copies share that stream, so whoever reuses a host buffer comes after its last copy. On a CPU a copy
is done when it is posted. Device memory is given back only after the computation's stream has waited for the copy: from then on
whatever is put there comes later.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.device.pinned_memory import PageLock, PinnedPool, Purpose, page_lock_of

PURPOSE = Purpose("offloaded activations", "offload fewer layers (offload.num_layers)")

Mark = Any
"""The end of some copies, as their lane knows it: a `torch.cuda.Event` on a GPU, None where they were done at once."""


class CopyLane(Protocol):
    """Where copies between host and device run."""

    def post(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Mark:
        """Copy (destination, source) each, after what has been posted on the computation's stream."""
        ...

    def wait(self, mark: Mark) -> None:
        """What the computation posts from now on comes after these copies."""
        ...


class SideStream:
    """Of a GPU.

    Args:
        cuda: makes streams and events; a race check has its own (`launch.footprint.races.streams`).
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device = device
        self.cuda = cuda
        self.stream = cuda.Stream(device)

    def post(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Mark:
        self.stream.wait_stream(self.cuda.current_stream(self.device))
        with self.cuda.stream(self.stream):
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)
            mark = self.cuda.Event()
            mark.record()
        return mark

    def wait(self, mark: Mark) -> None:
        assert mark is not None
        self.cuda.current_stream(self.device).wait_event(mark)


class InPlace:
    """Of a CPU, where nothing runs beside the computation."""

    def post(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Mark:
        for destination, source in copies:
            destination.copy_(source)
        return None

    def wait(self, mark: Mark) -> None:
        assert mark is None


@dataclass(slots=True, eq=False)
class OffloadedStorage:
    """The elements of one storage, in order.

    Attributes:
        tensor: on the device; None while they are on the host alone.
        buffer: on the host; None before they were sent and after they have come back.
    """

    tensor: torch.Tensor | None
    buffer: torch.Tensor | None = None


class HostMemory:
    """Host buffers of activations, page-locked for a GPU, kept by size and reused.

    Args:
        device: of the activations.
        lane: where copies run; None: the device's.
        page_lock: locks the buffers; None: the device's.

    Attributes:
        making: entered while a buffer is taken, for who counts a step's memory (a later step makes none).
        pool: of the buffers.
    """

    def __init__(self, device: torch.device, lane: CopyLane | None = None, page_lock: PageLock | None = None) -> None:
        self.device = device
        self.lane = lane or (SideStream(device) if device.type == "cuda" else InPlace())
        self.making: Callable[[], AbstractContextManager[object]] = nullcontext
        self.pool = PinnedPool(page_lock or page_lock_of(device), PURPOSE)

    def send(self, moved: Sequence[OffloadedStorage]) -> Mark:
        """Post the copies to the host. The tensors stay until `let_go`."""
        copies = []
        for each in moved:
            assert each.tensor is not None
            each.buffer = self._buffer(each.tensor.numel(), each.tensor.dtype)
            copies.append((each.buffer, each.tensor))
        return self.lane.post(copies)

    def let_go(self, moved: Sequence[OffloadedStorage], mark: Mark) -> None:
        """Give the device memory back that `send` with this mark has read."""
        self.lane.wait(mark)
        for each in moved:
            each.tensor = None

    def fetch(self, moved: Sequence[OffloadedStorage]) -> Mark:
        """Post the copies back; their results may be used after `arrived`. The buffers are free from here on."""
        copies = []
        for each in moved:
            assert each.buffer is not None and each.tensor is None
            each.tensor = torch.empty(each.buffer.shape, dtype=each.buffer.dtype, device=self.device)
            copies.append((each.tensor, each.buffer))
            # Free at once: whatever is copied to it next is posted behind this copy, on the same stream.
            self.pool.give(each.buffer)
            each.buffer = None
        return self.lane.post(copies)

    def arrived(self, mark: Mark) -> None:
        """What the computation posts from now on may use what `fetch` with this mark brings."""
        self.lane.wait(mark)

    @property
    def num_free(self) -> int:
        """Buffers that nobody uses."""
        return self.pool.num_free

    def _buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with self.making():
            return self.pool.take(numel, dtype)
