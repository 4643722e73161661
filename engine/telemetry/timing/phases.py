"""Where the time of a step goes, on the host's clock (no torch here).

    phase(DATA) ---- phase(FORWARD_BACKWARD) ------------ end_step()  phase(VALIDATION) ----- phase(DATA) ...
         data      |      forward_backward              |   other   |      validation        |
         `------------------ this step's spans --------'`----- the next step's spans ------...

One phase is running at any time, so the spans of a step add up to the time between two ends of steps, by construction.
A switch costs one reading of the clock. On a GPU a phase is charged what the host waits for in it: kernels that were
launched in one phase and waited for in the next count there; over several steps this evens out.
"""

import time
from collections.abc import Callable

from triaxis.engine.run.phases import Phase


def has_line(step: int, log_interval: int, num_steps: int) -> bool:
    """Return whether a step, counted from 1, has a line: the first, the last and every `log_interval`-th."""
    return step == 1 or step == num_steps or (step % log_interval == 0 and step < num_steps)


class Timers:
    """Named spans of host time that leave no gap; `clock` returns seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._phase = Phase.OTHER
        self._since_seconds = clock()
        self._spans_seconds: dict[Phase, float] = {}

    def phase(self, phase: Phase) -> None:
        """End the running phase and start another; a phase that comes twice in a step is added up."""
        now = self._clock()
        self._spans_seconds[self._phase] = self._spans_seconds.get(self._phase, 0.0) + now - self._since_seconds
        self._phase, self._since_seconds = phase, now

    def running_seconds(self) -> float:
        """Return how long the running phase has been running."""
        return self._clock() - self._since_seconds

    def end_step(self) -> dict[Phase, float]:
        """Return seconds by phase since the last end of a step; what follows is `Phase.OTHER` until a phase is named."""
        self.phase(Phase.OTHER)
        spans, self._spans_seconds = self._spans_seconds, {}
        return spans
