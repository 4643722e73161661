"""Copies small vectors between host and device without making either wait.

If the host reads a number from a GPU (`item`, `tolist`, `float`), it waits for all posted work. The GPU then idles until the host
posts more. So a step copies its numbers into pinned memory (`HostCopy`), and the host reads them one step later.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy `values` to the device as a vector, without making the host wait."""
    is_cuda = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=is_cuda).to(device, non_blocking=True)


class ToHost(Protocol):
    """A copier into host memory. Its copies are queued after the current stream's work."""

    def room(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return host memory for a copy of the tensor, with its shape and dtype."""
        ...

    def post(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Post the copies (destination, source), and return a mark for `finish`."""
        ...

    def finish(self, mark: Any) -> None:
        """Make the host wait for the copies of the `post` that returned `mark`."""
        ...


class FromCuda:
    """A copier from a GPU into pinned memory, on the GPU's current stream."""

    def room(self, tensor: torch.Tensor) -> torch.Tensor:
        # torch's allocator rounds to a power of two, and keeps the memory until the copy is made.
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def post(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        for destination, source in copies:
            destination.copy_(source, non_blocking=True)
        mark = torch.cuda.Event()
        mark.record()
        return mark

    def finish(self, mark: Any) -> None:
        mark.synchronize()


class HostCopy:
    """An asynchronous copy of a vector to the host, which starts at construction.

    Args:
        vector: 1-D tensor, which nobody may change afterwards.
    """

    def __init__(self, vector: torch.Tensor) -> None:
        self._values = vector
        self._mark: Any = None
        # A CPU vector stays in place.
        self._to_host = FromCuda() if vector.is_cuda else None
        if self._to_host is not None:
            self._values = self._to_host.room(vector)
            self._mark = self._to_host.post([(self._values, vector)])

    def arrived(self) -> torch.Tensor:
        """Return the vector on the host. Wait for the device if the copy is not complete."""
        if self._to_host is not None:
            self._to_host.finish(self._mark)
        return self._values

    def wait(self) -> list[float]:
        """Wait for the copy and return the vector as numbers."""
        return [float(value) for value in self.arrived().tolist()]
