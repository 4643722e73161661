"""Copies between host and device, in a GPU's side stream or immediately on a CPU."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

Mark = Any
"""Marks the end of posted copies: a `torch.cuda.Event` on a GPU, None on a CPU, where copies are done at once."""


class CopyLane(Protocol):
    """Copies between host and device: `post` starts them, `wait` makes later compute work wait."""

    def post(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Mark:
        """Copy each (destination, source) after all compute work posted so far. Give the returned mark to `wait`."""
        ...

    def wait(self, mark: Mark) -> None:
        """Make later compute work wait for the copies that `mark` stands for."""
        ...


class SideStream:
    """A copy lane that uses a GPU's side stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def post(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Mark:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)
            mark = torch.cuda.Event()
            mark.record()
        return mark

    def wait(self, mark: Mark) -> None:
        assert mark is not None
        torch.cuda.current_stream(self.device).wait_event(mark)


class InPlace:
    """The `CopyLane` for a CPU: `post` copies at once, so `wait` has nothing to do."""

    def post(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Mark:
        for destination, source in copies:
            destination.copy_(source)
        return None

    def wait(self, mark: Mark) -> None:
        assert mark is None


def lane_of(device: torch.device) -> CopyLane:
    """Return a new copy lane for copies between the host and `device`."""
    return SideStream(device) if device.type == "cuda" else InPlace()
