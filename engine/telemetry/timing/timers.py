"""Where the time of a step goes, on the host's clock.

    enter(DATA) --- enter(FORWARD_BACKWARD) ----------- end_step()  enter(VALIDATION) ---- enter(DATA) ...
         data      |      forward_backward              |   other   |      validation        |
         `------------------ this step's spans --------'`----- the next step's spans ------...

One part is running at any time, so the spans of a step add up to the time between two ends of steps, by construction.
A switch costs one reading of the clock. On a GPU a part is charged what the host waits for in it: kernels that were
launched in one part and waited for in the next count there; over several steps this evens out.
"""

import time
from collections.abc import Callable

from triaxis.engine.run.step_parts import StepPart


def has_line(step: int, log_interval: int, num_steps: int) -> bool:
    """Return whether a step, counted from 1, has a line: the first, the last and every `log_interval`-th."""
    return step == 1 or step == num_steps or (step % log_interval == 0 and step < num_steps)


class Timers:
    """Named spans of host time that leave no gap; `clock` returns seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._part = StepPart.OTHER
        self._since_seconds = clock()
        self._spans_seconds: dict[StepPart, float] = {}

    def enter(self, part: StepPart) -> None:
        """End the running part and start another; a part that comes twice in a step is added up."""
        now = self._clock()
        self._spans_seconds[self._part] = self._spans_seconds.get(self._part, 0.0) + now - self._since_seconds
        self._part, self._since_seconds = part, now

    def running_seconds(self) -> float:
        """Return how long the running part has been running."""
        return self._clock() - self._since_seconds

    def end_step(self) -> dict[StepPart, float]:
        """Return seconds by part since the last end of a step; what follows is `StepPart.OTHER` until a part is named."""
        self.enter(StepPart.OTHER)
        spans, self._spans_seconds = self._spans_seconds, {}
        return spans
