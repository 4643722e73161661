"""Queues steps until the host reads their numbers, and defines the rollback request."""

from collections import deque
from dataclasses import dataclass

from triaxis.engine.comm.stop import StopRequest
from triaxis.engine.step_result import PendingResult, StepResult


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """Step whose numbers are on the host.

    Attributes:
        step: step number, from 0.
        lr: learning rate used in the update.
        result: the step's result, the same on every rank.
    """

    step: int
    lr: float
    result: StepResult


class StepsInFlight:
    """Queue of posted steps that the host has not read yet.

    The host reads a step after it has posted the next one, so a GPU always has work.
    """

    def __init__(self) -> None:
        self._posted: deque[tuple[int, float, PendingResult]] = deque()

    def post(self, step: int, lr: float, result: PendingResult) -> None:
        self._posted.append((step, lr, result))

    def read(self, stop: StopRequest, *, newest: bool) -> list[FinishedStep]:
        """Wait for every posted step but the newest, and return these steps, oldest first.

        Each step's stop flags may set `stop.agreed`. The newest is returned too if `newest` is set or `stop.agreed` is. Every rank
        gets the same steps, each once.
        """
        finished = []
        while len(self._posted) > 1 or (self._posted and (newest or stop.agreed is not None)):
            step, lr, pending = self._posted.popleft()
            result = pending.read()
            stop.decide(result.flags.stop)
            finished.append(FinishedStep(step, lr, result))
        return finished


class RollbackRequested(Exception):  # noqa: N818 - a decision, no error
    """Request to roll back to a checkpoint, raised on every rank at once.

    Attributes:
        step: step number, from 0; the checkpoint must be from before this step.
        samples: range [first, stop) of the sample ids to leave out from now on.
        why: error text for a run that may not roll back again.
    """

    def __init__(self, step: int, samples: tuple[int, int], why: str) -> None:
        super().__init__(why)
        self.step = step
        self.samples = samples
        self.why = why
