"""The activities of a rank in time: a mark wherever one ends and the next begins.

    part         data | forward_backward                             | optimizer          | other
    instruction        | 0F0               | post | 0F1     | 0B0 ... |                    |
    wait               |     | tp |        |      |  | pp |           |         | world |  |
    marks         ^    ^     ^    ^        ^      ^  ^    ^ ^         ^         ^       ^  ^

Between two marks the rank does one thing, so a step is cut without gaps, by construction. Parts come from the training loop,
instructions from the executor, waits for calls and reads by the host from the ledger. A mark is a reading of the host's clock where
waits stop the host, and a CUDA event where they stop a stream (`triaxis.engine.telemetry.timing.clocks`). An event has no
time until the device has reached it, so marks are read when the numbers of their step are, and never waited for.

Calls of context parallelism are under way while something else is computed. Each has two marks of its own: where it was posted, and
where its future is complete. gloo runs a future's callback on its own thread once the result is there. NCCL's future is
complete once the call is enqueued, and torch runs the callback with a current stream that waits for the call: an event that is
recorded there is reached when the call is over (documentation of `torch.distributed.Work.get_future`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from triaxis.engine.comm.ledger import Event
from triaxis.engine.pipeline.lowering import Instruction
from triaxis.engine.run.step_parts import StepPart


class Activity(NamedTuple):
    """The activity of a rank between two marks: the innermost of the three. `wait` is for a call, or for a read by the host."""

    part: StepPart
    instruction: Instruction | None = None
    wait: Event | None = None


class Clock(Protocol):
    """A maker of marks that can measure the time between them; `samples`: a mark is too dear for every step."""

    @property
    def samples(self) -> bool: ...

    def mark(self) -> Any:
        """Mark this moment, in the order of what this rank computes."""

    def elapsed(self, marks: Sequence[Any]) -> list[float]:
        """Return seconds from the first of some marks to each of them. The numbers of their step have been read."""

    def anchor(self) -> tuple[Any, float]:
        """Return a mark, and `time.perf_counter` at its moment; may wait for the device."""


class CallMarks(NamedTuple):
    """The marks of a call that may be hidden: where it was posted, and, one per handle, where it was over."""

    posted: Any
    over: list[Any]


@dataclass(slots=True)
class MarkedStep:
    """A step from the end of the one before it to its own end.

    Attributes:
        step: counts from 1.
        marks: of the clock, one more than `activities`.
        activities: what was done from each mark to the next.
        calls: of context parallelism, which were under way in some of these activities.
    """

    step: int
    marks: list[Any] = field(default_factory=list)
    activities: list[Activity] = field(default_factory=list)
    calls: list[CallMarks] = field(default_factory=list)

    def calls_elapsed(self, clock: Clock) -> list[tuple[float, float]]:
        """Return from when to when each call was under way, in seconds from the step's first mark. Its numbers have been read."""
        ended = [call for call in self.calls if call.over]
        marks = [mark for call in ended for mark in (call.posted, *call.over)]
        _, *times, _ = clock.elapsed([self.marks[0], *marks, self.marks[-1]])
        each = iter(times)
        return [(next(each), max(next(each) for _ in call.over)) for call in ended]


class TimeMarks:
    """The marks of one rank, which follow its parts, instructions and waits (`triaxis.engine.comm.ledger.WaitObserver`).

    No step is marked before `begin`. In a step that is not marked, nothing is done.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._step = 0
        self._part = StepPart.OTHER
        self._instruction: Instruction | None = None
        self._running: MarkedStep | None = None
        self._ended: deque[MarkedStep] = deque()

    def begin(self, steps_made: int, *, is_marked: bool) -> None:
        """Begin after `steps_made` steps, where a run begins or goes back to; forget what was marked and not taken."""
        self._ended.clear()
        self._part, self._instruction = StepPart.OTHER, None
        self._start(steps_made + 1, is_marked)

    def enter(self, part: StepPart) -> None:
        """Follow the loop to its next part."""
        self._part, self._instruction = part, None
        self._switch(None)

    def instruction(self, instruction: Instruction | None) -> None:
        """Follow the executor to its next instruction; None: it has run the last."""
        self._instruction = instruction
        self._switch(None)

    def under_way(self, posted: Event, handles: Sequence[Any]) -> None:
        """Mark a call that may be hidden, and its end once it is over."""
        running = self._running
        if running is None or posted.axis != "cp" or self._part is not StepPart.FORWARD_BACKWARD:
            return
        call = CallMarks(self.clock.mark(), [])
        running.calls.append(call)
        for handle in handles:
            handle.get_future().add_done_callback(lambda _: call.over.append(self.clock.mark()))

    def wait_begins(self, posted: Event) -> None:
        """Mark the beginning of a wait for a call."""
        self._switch(posted)

    def wait_ends(self) -> None:
        """Mark the end of a wait."""
        self._switch(None)

    def read_begins(self, mark: Event) -> None:
        """Mark the beginning of a read by the host."""
        self._switch(mark)

    def read_ends(self) -> None:
        """Mark the end of a read: a device has stood still since it had the numbers."""
        self._switch(None)

    def end_step(self, *, next_is_marked: bool) -> None:
        """End the running step and begin the next one; both share one mark, so that no time between them is lost."""
        self._part, self._instruction = StepPart.OTHER, None
        mark = None
        if self._running is not None:
            mark = self.clock.mark()
            self._running.marks.append(mark)
            self._ended.append(self._running)
        self._start(self._step + 1, next_is_marked, mark)

    def take(self, step: int) -> MarkedStep | None:
        """Return the marks of a step that has ended, once; None: it was not marked. Earlier steps are forgotten."""
        while self._ended and self._ended[0].step <= step:
            ended = self._ended.popleft()
            if ended.step == step:
                return ended
        return None

    def close(self) -> None:
        """Stop marking: the loop has ended."""
        self._running = None

    def _start(self, step: int, is_marked: bool, mark: Any = None) -> None:
        self._step = step
        self._running = MarkedStep(step) if is_marked else None
        self._switch(None, mark)

    def _switch(self, wait: Event | None, mark: Any = None) -> None:
        """Begin another activity, at a mark that exists or at a new one."""
        running = self._running
        if running is not None:
            running.marks.append(self.clock.mark() if mark is None else mark)
            running.activities.append(Activity(self._part, self._instruction, wait))
