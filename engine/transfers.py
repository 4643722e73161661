"""Small things between host and device, without making one wait for the other.

A GPU works through what the host has posted. Reading a number back (`item`, `tolist`, `float`) waits until it has caught up, and
copying from ordinary memory to it waits as well; then it stands idle until the host has posted more. A step does neither: what
the host wants to know is copied into pinned memory behind the work that makes it (`HostCopy`), and read a step later.
"""

from collections.abc import Sequence

import torch


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` as a vector on the device; the host goes on at once."""
    is_cuda = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=is_cuda).to(device, non_blocking=True)


class HostCopy:
    """A vector on its way to the host.

    Args:
        vector: one dim, not changed afterwards.
    """

    def __init__(self, vector: torch.Tensor) -> None:
        self._values = vector
        self._arrived: torch.cuda.Event | None = None
        if vector.is_cuda:
            # From torch's allocator: rounding to a power of two costs bytes here, and it keeps the memory until the copy is made.
            self._values = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            self._values.copy_(vector, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def arrived(self) -> torch.Tensor:
        """The vector on the host; waits for the device where it has not arrived yet."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values

    def wait(self) -> list[float]:
        """The same as numbers."""
        return [float(value) for value in self.arrived().tolist()]
