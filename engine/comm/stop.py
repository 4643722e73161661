"""Stops a run before its last step when any rank receives a signal.

    SIGTERM, SIGUSR1    preempted      finish the step, save, end with the requeue code
    SIGHUP              preempted      the same; under nohup the signal stays ignored
    SIGINT              interrupted    finish the step, save, end as after Ctrl-C
    SIGINT again        -              end at once, nothing is saved

A handler only sets a flag. The step's small all-reduce sums the flags, so all ranks stop after the same step and save it together.
The flags are also summed with each validation batch and each token of the sample text.

Before training there is nothing to save, so these signals end the rank. In `evaluate`, `generate` and `verify`, they end the rank
at any time.
"""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from types import FrameType

from triaxis.engine.comm.agreement import StopFlags


class Stop(Enum):
    """The reason why a run ends before its last step."""

    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"
    NEXT_PHASE = "next phase"
    """Nobody requested it: the phase has ended, and the next one begins with its own ranks."""


STOP_OF_SIGNAL = {
    signal.SIGTERM: Stop.PREEMPTED,
    signal.SIGUSR1: Stop.PREEMPTED,
    signal.SIGHUP: Stop.PREEMPTED,
    signal.SIGINT: Stop.INTERRUPTED,
}
"""The stop that each signal requests from a training rank."""


def stop_signals() -> list[signal.Signals]:
    """List the signals in `STOP_OF_SIGNAL`, without a SIGHUP that this process ignores."""
    return [one for one in STOP_OF_SIGNAL if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN]


class StopRequest:
    """One rank's requests to stop, and all ranks' decision.

    Args:
        rank: this rank's number, for the line that reports a signal.
        write: function (bytes), which writes that line; it may be called in the middle of another print.

    Attributes:
        agreed: reason why the run stops, the same on every rank; None: the run goes on.
    """

    def __init__(self, rank: int = 0, write: Callable[[bytes], object] = lambda line: os.write(2, line)) -> None:
        self.agreed: Stop | None = None
        self._rank, self._write = rank, write
        self._asked: set[Stop] = set()
        self._before: dict[int, signal.Handlers | int | None] = {}

    def listen(self) -> None:
        """Install the signal handlers, which request a stop on this rank. Python allows this in the main thread only."""
        for number in stop_signals():
            self._before[number] = signal.signal(number, self._on_signal)  # type: ignore[assignment]

    def close(self) -> None:
        """Restore the handlers from before `listen`."""
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def ask(self, stop: Stop) -> None:
        """Request a stop on this rank. The other ranks learn of the request in the next step's all-reduce."""
        self._asked.add(stop)

    def flags(self) -> StopFlags:
        """Return this rank's flags for the next step's agreement."""
        return StopFlags(float(Stop.PREEMPTED in self._asked), float(Stop.INTERRUPTED in self._asked))

    def decide(self, flags: Sequence[float]) -> None:
        """Set `agreed` from a step's `flags()`, summed over all ranks. An interrupt on any rank outranks a preemption."""
        preempted, interrupted = flags
        if interrupted:
            self.agreed = Stop.INTERRUPTED
        elif preempted and self.agreed is None:
            self.agreed = Stop.PREEMPTED

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        stop = STOP_OF_SIGNAL[signal.Signals(number)]
        if stop not in self._asked:
            # Bypasses Python's buffers: the handler may interrupt another print between two bytes.
            name = signal.Signals(number).name
            with suppress(OSError):  # a full disk under the log; the handler must not end the step
                self._write(f"rank {self._rank}: {name}: all ranks finish their step, save and stop\n".encode())
        self.ask(stop)
        if stop is Stop.INTERRUPTED:
            # A second SIGINT gets the kernel's own action, which also ends a rank that hangs in a collective.
            signal.signal(number, signal.SIG_DFL)
