"""Steps that are posted and not read (the host reads a step's numbers while the next one runs), and the request to go back."""

from collections import deque
from dataclasses import dataclass

from triaxis.engine.comm.stop import StopRequest
from triaxis.engine.step_result import PendingResult, StepResult


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step whose numbers are on the host.

    Attributes:
        step: its number, from 0.
        lr: learning rate of its update.
        result: its result, the same on every rank.
    """

    step: int
    lr: float
    result: StepResult


class StepsInFlight:
    """Steps that are posted and not read, in order; a step is read once the next one is posted, so a GPU always has work."""

    def __init__(self) -> None:
        self._posted: deque[tuple[int, float, PendingResult]] = deque()

    def post(self, step: int, lr: float, result: PendingResult) -> None:
        self._posted.append((step, lr, result))

    def read(self, stop: StopRequest, *, newest: bool) -> list[FinishedStep]:
        """Read every step but the newest, and that one too if `newest`, or if a step before it carries an agreed stop.

        Every rank reads the same steps here, because the sums of a step are the same on all of them.
        """
        finished = []
        while len(self._posted) > 1 or (self._posted and (newest or stop.agreed is not None)):
            step, lr, pending = self._posted.popleft()
            result = pending.read()
            stop.decide(result.flags.stop)
            finished.append(FinishedStep(step, lr, result))
        return finished


class RollbackRequested(Exception):  # noqa: N818 - a decision, no error
    """The request to go back to before step number `step` (from 0); on every rank at once.

    Attributes:
        samples: range [first, stop) of sample ids to leave out from then on.
        why: text of the error for a run that may not go back again.
    """

    def __init__(self, step: int, samples: tuple[int, int], why: str) -> None:
        super().__init__(why)
        self.step = step
        self.samples = samples
        self.why = why
