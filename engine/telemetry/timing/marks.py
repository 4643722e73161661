"""What a rank does, and when: a mark wherever it goes on to something else (no torch here).

    phase         data | forward_backward                             | optimizer          | other
    instruction        | 0F0               | post | 0F1     | 0B0 ... |                    |
    wait               |     | tp |        |      |  | pp |           |         | world |  |
    marks         ^    ^     ^    ^        ^      ^  ^    ^ ^         ^         ^       ^  ^

Between two marks the rank does one thing, so a step is cut without gaps, by construction. Phases come from the training loop,
instructions from the executor, waits from the ledger of calls (`Marks` is its clock). What a mark is, is the matter of a clock:
a reading of the host's clock where waits stop the host, a CUDA event where they stop a stream (`engine.telemetry.timing.clocks`).
An event has no time until the device has come to it, so marks are looked at when the numbers of their step are read, and never
waited for.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from engine.comm.ledger import Event
from engine.pipeline.lowering import Instruction
from engine.run.phases import Phase


class Doing(NamedTuple):
    """What a rank does between two marks: the innermost of the three that are there."""

    phase: Phase
    instruction: Instruction | None = None
    wait: Event | None = None


class Clock(Protocol):
    """Makes marks, and knows how far they are apart."""

    def mark(self) -> Any:
        """Now, in the order of what this rank computes."""

    def elapsed(self, marks: Sequence[Any]) -> list[float]:
        """Seconds from the first of some marks to each of them. The numbers of their step have been read."""

    def anchor(self) -> tuple[Any, float]:
        """A mark, and what `time.perf_counter` says at its moment; may wait for the device."""


@dataclass(slots=True)
class MarkedStep:
    """A step from the end of the one before it to its own end.

    Attributes:
        step: counts from 1.
        marks: of the clock, one more than `doings`.
        doings: what was done from each mark to the next.
    """

    step: int
    marks: list[Any] = field(default_factory=list)
    doings: list[Doing] = field(default_factory=list)


class Marks:
    """The marks of one rank; a `engine.telemetry.trace.profile.StepWatcher`, and the clock of a ledger.

    Args:
        clock: makes the marks.
        wants: whether a step, counted from 1, is marked. In one that is not, nothing is done.
        steps_made: before this attempt.
    """

    def __init__(self, clock: Clock, wants: Callable[[int], bool], steps_made: int) -> None:
        self._clock = clock
        self._wants = wants
        self._phase = Phase.OTHER
        self._instruction: Instruction | None = None
        self._running: MarkedStep | None = None
        self._ended: deque[MarkedStep] = deque()
        self._start(steps_made + 1)

    def phase(self, phase: Phase) -> None:
        """Follow the loop to its next phase."""
        self._phase, self._instruction = phase, None
        self._go_on(None)

    def instruction(self, instruction: Instruction | None) -> None:
        """The executor goes on to an instruction, or has come to the end of its program."""
        self._instruction = instruction
        self._go_on(None)

    def wait_begins(self, posted: Event) -> None:
        """The rank needs the result of a call now."""
        self._go_on(posted)

    def wait_ends(self) -> None:
        """It has it."""
        self._go_on(None)

    def end_step(self) -> None:
        """End the running step and begin the next one; both share one mark, so that no time between them is lost."""
        self._phase, self._instruction = Phase.OTHER, None
        mark = None
        if self._running is not None:
            mark = self._clock.mark()
            self._running.marks.append(mark)
            self._ended.append(self._running)
        self._start(self._step + 1, mark)

    def take(self, step: int) -> MarkedStep | None:
        """The marks of a step that has ended, once; None: it was not marked. Earlier steps are forgotten."""
        while self._ended and self._ended[0].step <= step:
            ended = self._ended.popleft()
            if ended.step == step:
                return ended
        return None

    def restart(self, steps_made: int) -> None:
        """The run goes back: what was marked and not taken is forgotten."""
        self._ended.clear()
        self._phase, self._instruction = Phase.OTHER, None
        self._start(steps_made + 1)

    def close(self) -> None:
        """No more marks: what comes now is no step of the loop."""
        self._running, self._wants = None, lambda step: False

    def _start(self, step: int, mark: Any = None) -> None:
        self._step = step
        self._running = MarkedStep(step) if self._wants(step) else None
        self._go_on(None, mark)

    def _go_on(self, wait: Event | None, mark: Any = None) -> None:
        """Begin to do something else, at a mark that is there or at a new one."""
        running = self._running
        if running is not None:
            running.marks.append(self._clock.mark() if mark is None else mark)
            running.doings.append(Doing(self._phase, self._instruction, wait))
