"""Times a rank's activities in a step with the host's clock or with CUDA events.

    CPU    `Pending.wait` stops the host, so the host's clock shows what each wait costs
    GPU    `Pending.wait` stops the stream, so an event is recorded on the current stream before and after the wait

The time between two events is the device's time, idle time included. A CPU run marks every step. A GPU run marks only sampled steps
(`StreamClock.samples`), because an event costs the host some microseconds. Nothing here waits for the device during a step. Events
are queried later, once the device has passed them.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


class HostClock:
    """The host's monotonic clock. On Linux, all processes on a machine share this clock.

    `samples` is true if a mark is so costly that only some steps are marked.
    """

    samples = False

    def mark(self) -> float:
        """Make a mark after the work that this rank has posted so far."""
        return time.perf_counter()

    def elapsed(self, marks: Sequence[float]) -> list[float]:
        """Measure the seconds from the first mark to each mark. The host must have read the step's numbers before."""
        return [mark - marks[0] for mark in marks]

    def anchor(self) -> tuple[float, float]:
        """Make a mark and read `time.perf_counter` at the same moment. The call may wait for the device."""
        now = time.perf_counter()
        return now, now


class StreamClock:
    """A clock whose marks are CUDA events on the current stream of the marking thread. Its methods are those of `HostClock`."""

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
        # The last mark comes right after the copy of the numbers that were read: it is reached, or some microseconds away.
        marks[-1].synchronize()
        return [marks[0].elapsed_time(mark) / 1e3 for mark in marks]

    def anchor(self) -> tuple[Any, float]:
        self._synchronize(self._device)
        event = self.mark()
        event.synchronize()
        return event, time.perf_counter()


Clock = HostClock | StreamClock


def clock_of(device: torch.device) -> Clock:
    """Choose the clock that measures a rank's waits on this device."""
    return StreamClock(device) if device.type == "cuda" else HostClock()
