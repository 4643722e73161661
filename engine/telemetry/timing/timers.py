"""Splits a step's time into parts, on the host's clock.

    enter(DATA) --- enter(FORWARD_BACKWARD) ----------- end_step()  enter(VALIDATION) ---- enter(DATA) ...
         data      |      forward_backward              |   other   |      validation        |
         `------------------ this step's spans --------'`----- the next step's spans ------...

One part is running at any time, so a step's spans add up to the time since the previous step's end. On a GPU, kernels count in the
part in which the host waits for them.
"""

import time
from collections.abc import Callable

from triaxis.engine.run.step_parts import StepPart


def has_line(step: int, log_interval: int, num_steps: int) -> bool:
    """Whether step `step`, counted from 1, has a printed line. The first, the last and every `log_interval`-th step do."""
    return step == 1 or step == num_steps or (step % log_interval == 0 and step < num_steps)


class Timers:
    """Measures host time by part, without gaps. `clock` returns seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._part = StepPart.OTHER
        self._since_seconds = clock()
        self._spans_seconds: dict[StepPart, float] = {}

    def enter(self, part: StepPart) -> None:
        """End the running part and start another. If a part runs twice in a step, its times are added."""
        now = self._clock()
        self._spans_seconds[self._part] = self._spans_seconds.get(self._part, 0.0) + now - self._since_seconds
        self._part, self._since_seconds = part, now

    def running_seconds(self) -> float:
        """Seconds since the running part began."""
        return self._clock() - self._since_seconds

    def end_step(self) -> dict[StepPart, float]:
        """Return and reset the seconds by part since the last step's end. Until the next `enter`, time counts as `OTHER`."""
        self.enter(StepPart.OTHER)
        spans, self._spans_seconds = self._spans_seconds, {}
        return spans
