"""The clocks that a step is marked by: the host's, and a CUDA stream's.

    CPU    `Pending.wait` stops the host, so the host's clock sees what each wait costs
    GPU    it stops the stream and the host runs ahead: an event is recorded on the current stream before and after, and the time
           between two events is what the device needed from one to the other, standing still included

Events cost the host some microseconds each, so a GPU's steps are marked by sample (`StreamClock.samples`); readings of the host's
clock cost a tenth of one, so on a CPU every step is. Nothing here waits for the device in a step: events are asked when the
host has read numbers that were made behind them.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


class HostClock:
    """The host's monotonic clock; on Linux it is one for all processes of a machine."""

    samples = False

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed(self, marks: Sequence[float]) -> list[float]:
        return [mark - marks[0] for mark in marks]

    def anchor(self) -> tuple[float, float]:
        now = time.perf_counter()
        return now, now


class StreamClock:
    """The order of work on the current CUDA stream, wherever a mark is made: forward on the main thread, backward on autograd's."""

    samples = True

    def __init__(
        self,
        device: torch.device,
        make_event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True),
        synchronize: Callable[[torch.device], None] = torch.cuda.synchronize,
    ) -> None:
        self._device = device
        self._make_event = make_event
        self._synchronize = synchronize

    def mark(self) -> Any:
        event = self._make_event()
        event.record()
        return event

    def elapsed(self, marks: Sequence[Any]) -> list[float]:
        # The last mark is right behind the copy of the numbers that were read: it is there, or some microseconds away.
        marks[-1].synchronize()
        return [marks[0].elapsed_time(mark) / 1e3 for mark in marks]

    def anchor(self) -> tuple[Any, float]:
        self._synchronize(self._device)
        event = self.mark()
        event.synchronize()
        return event, time.perf_counter()


def clock_of(device: torch.device) -> HostClock | StreamClock:
    """Return the clock that sees what a rank on this device waits for."""
    return StreamClock(device) if device.type == "cuda" else HostClock()
