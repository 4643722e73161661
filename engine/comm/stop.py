"""A run that is asked to stop before its last step: signals on any rank, agreed by all.

    SIGTERM, SIGUSR1    preempted      finish the step, save, end with the requeue code: the run goes on later
    SIGHUP              the same       the terminal or the connection is gone; under nohup it stays ignored
    SIGINT              interrupted    finish the step, save, end as after Ctrl-C
    SIGINT again        -              end at once, nothing is saved

A handler only remembers. What this rank was asked travels as two flags in the step's small all-reduce; every rank reads the sum
of the same step at the same point of its loop, so all of them stop after the same step and save it together.

The batches of a validation (`engine/run/validation.py`) and the tokens of the sample text carry the same flags.

Before training there is nothing to save: then these signals do what they do by default and end the rank. `evaluate`, `generate` and
`verify` never save, so there they do so at any time.
"""

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from types import FrameType

from triaxis.engine.comm.agreement import StopFlags


class Stop(Enum):
    """The reason for which a run ends before its last step."""

    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"
    NEXT_PHASE = "next phase"
    """Not asked for by anyone: the phase has ended, and the next one begins with ranks of its own."""


STOP_OF_SIGNAL = {
    signal.SIGTERM: Stop.PREEMPTED,
    signal.SIGUSR1: Stop.PREEMPTED,
    signal.SIGHUP: Stop.PREEMPTED,
    signal.SIGINT: Stop.INTERRUPTED,
}
"""What a signal asks a rank that trains for."""


def stop_signals() -> list[signal.Signals]:
    """Return the signals of `STOP_OF_SIGNAL` that have an effect here: under nohup, SIGHUP is ignored from the start."""
    return [one for one in STOP_OF_SIGNAL if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN]


class StopRequest:
    """The requests of one rank to stop, and the decision of all ranks.

    Args:
        rank: this one, for the line that reports a signal.

    Attributes:
        agreed: why the run stops, the same on every rank; None: it goes on.
    """

    def __init__(self, rank: int = 0) -> None:
        self.agreed: Stop | None = None
        self._rank = rank
        self._asked: set[Stop] = set()
        self._before: dict[int, signal.Handlers | int | None] = {}

    def listen(self) -> None:
        """Let signals request a stop of this rank from now on; only in the main thread (Python's rule)."""
        for number in stop_signals():
            self._before[number] = signal.signal(number, self._on_signal)  # type: ignore[assignment]

    def close(self) -> None:
        """Restore what signals did before `listen`."""
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def ask(self, stop: Stop) -> None:
        """Ask this rank; the others learn of it with the next step's agreement."""
        self._asked.add(stop)

    def flags(self) -> StopFlags:
        """Return this rank's flags for the next step's agreement."""
        return StopFlags(float(Stop.PREEMPTED in self._asked), float(Stop.INTERRUPTED in self._asked))

    def decide(self, flags: Sequence[float]) -> None:
        """Decide from the sums of `flags()` over all ranks, of the next step in order. Ctrl-C counts more than a scheduler."""
        preempted, interrupted = flags
        if interrupted:
            self.agreed = Stop.INTERRUPTED
        elif preempted and self.agreed is None:
            self.agreed = Stop.PREEMPTED

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        stop = STOP_OF_SIGNAL[signal.Signals(number)]
        if stop not in self._asked:
            # Past Python's buffers: the handler may have come between two bytes of another print.
            name = signal.Signals(number).name
            with suppress(OSError):  # a full disk under the log; the handler must not end the step
                os.write(2, f"rank {self._rank}: {name}: all ranks finish their step, save and stop\n".encode())
        self.ask(stop)
        if stop is Stop.INTERRUPTED:
            # The kernel's own action for the second one, which also ends a rank that hangs in a collective.
            signal.signal(number, signal.SIG_DFL)
