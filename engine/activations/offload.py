"""Copies activations to host memory and back while the computation runs.

    device   | layer 0 | layer 1       | layer 2 ...      backward: | layer 2       | layer 1       | layer 0 |
    copies             | 0 -> host     | 1 -> host                  | host -> 1     | host -> 0     |

On a GPU, all copies run on one side stream. A copy waits for the work posted earlier on the compute stream. The compute stream
waits for the copies at `let_go` and `arrived`; the host never waits. Device memory is freed only after the compute stream has
waited for the copy. On a CPU, a copy is done when it is posted.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from triaxis.engine.device.copy_lane import CopyLane, Mark, lane_of
from triaxis.engine.device.pinned_memory import PageLock, PinnedPool, Purpose, page_lock_of

PURPOSE = Purpose("offloaded activations", "offload fewer layers (offload.num_layers)")


@dataclass(slots=True, eq=False)
class OffloadedStorage:
    """The elements of one storage, on the device or in host memory.

    Attributes:
        tensor: device copy; None while only the host holds the elements.
        buffer: host copy; None before `send` and after `fetch`.
    """

    tensor: torch.Tensor | None
    buffer: torch.Tensor | None = None

    def whole(self) -> torch.Tensor:
        """Return the device copy, which exists once the layer's backward has begun."""
        assert self.tensor is not None, "its layer's backward has begun, so it has been fetched"
        return self.tensor


class HostMemory:
    """Host buffers for activations, kept by size and reused.

    Args:
        device: the activations' device.
        lane: object that runs the copies, such as a GPU's side stream; None: the device's default.
        page_lock: lock for the buffers' pages; None: the device's default.

    Attributes:
        making: function () -> context that is open while a buffer is taken from the pool; memory accounting sets it.
        pool: the buffers.
    """

    def __init__(self, device: torch.device, lane: CopyLane | None = None, page_lock: PageLock | None = None) -> None:
        self.device = device
        self.lane = lane or lane_of(device)
        self.making: Callable[[], AbstractContextManager[object]] = nullcontext
        self.pool = PinnedPool(page_lock or page_lock_of(device), PURPOSE)

    def send(self, moved: Sequence[OffloadedStorage]) -> Mark:
        """Start copies of the storages to host memory. Return a mark, with which `let_go` waits for these copies."""
        copies = []
        for each in moved:
            assert each.tensor is not None
            with self.making():
                each.buffer = self.pool.take(each.tensor.numel(), each.tensor.dtype)
            copies.append((each.buffer, each.tensor))
        return self.lane.post(copies)

    def let_go(self, moved: Sequence[OffloadedStorage], mark: Mark) -> None:
        """Free the device tensors. Later compute work first waits for the copies of `send`."""
        self.lane.wait(mark)
        for each in moved:
            each.tensor = None

    def fetch(self, moved: Sequence[OffloadedStorage]) -> Mark:
        """Start the copies back to the device. Return a mark, with which `arrived` waits for these copies.

        Use the device tensors only after `arrived`. The host buffers go back to the pool.
        """
        copies = []
        for each in moved:
            assert each.buffer is not None and each.tensor is None
            each.tensor = torch.empty(each.buffer.shape, dtype=each.buffer.dtype, device=self.device)
            copies.append((each.tensor, each.buffer))
            # Free at once: the next copy into it is posted after this one, on the same stream.
            self.pool.give(each.buffer)
            each.buffer = None
        return self.lane.post(copies)

    def arrived(self, mark: Mark) -> None:
        """Make later compute work wait for the copies of `fetch`."""
        self.lane.wait(mark)

    @property
    def num_free(self) -> int:
        """Number of buffers in the pool that hold no activations."""
        return self.pool.num_free
