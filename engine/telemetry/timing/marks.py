"""Marks the moments at which one activity of a rank ends and the next begins.

    part         data | forward_backward                             | optimizer          | other
    instruction        | 0F0               | post | 0F1     | 0B0 ... |                    |
    wait               |     | tp |        |      |  | pp |           |         | world |  |
    marks         ^    ^     ^    ^        ^      ^  ^    ^ ^         ^         ^       ^  ^

Between two marks the rank does one thing, so a step is split without gaps. The training loop reports parts. The executor reports
instructions: `0F1` is chunk 0's forward of microbatch 1, `post` starts sends and receives. The communication ledger reports waits
for calls and host reads. A mark is a host clock reading or a CUDA event (`triaxis.engine.telemetry.timing.clocks`). A step's marks
are read together with the step's numbers, when all events have times.

Context-parallel calls run while something else is computed. Each call has two marks, at its post and at its end. The second is set
in a callback of the call's future. gloo runs the callback once the result exists. With NCCL, torch runs the callback on a stream
that waits for the call, so an event marks the call's end (see `torch.distributed.Work.get_future`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from triaxis.engine.comm.ledger import Event
from triaxis.engine.pipeline.lowering import Instruction
from triaxis.engine.run.step_parts import StepPart

if TYPE_CHECKING:
    from triaxis.engine.telemetry.timing.clocks import Clock


class Activity(NamedTuple):
    """A rank's activity between two marks. The last field that is set tells what the rank does.

    `instruction` runs inside `part`. `wait` is the communication ledger's event for the call or host read that the rank waits for.
    """

    part: StepPart
    instruction: Instruction | None = None
    wait: Event | None = None


class CallMarks(NamedTuple):
    """Marks of a context-parallel call: its post, and in `over` the end of each handle's work."""

    posted: Any
    over: list[Any]


@dataclass(slots=True)
class MarkedStep:
    """The marks taken in one step, from the previous step's end to this step's end.

    Attributes:
        step: step, counted from 1.
        marks: clock marks, one more than `activities`.
        activities: activity between each mark and the next.
        calls: context-parallel calls that ran during some of these activities.
    """

    step: int
    marks: list[Any] = field(default_factory=list)
    activities: list[Activity] = field(default_factory=list)
    calls: list[CallMarks] = field(default_factory=list)

    def calls_elapsed(self, clock: "Clock") -> list[tuple[float, float]]:
        """Measure each call's start and end, in seconds from the step's first mark.

        The host must have read the step's numbers before. Calls without an end mark are left out.
        """
        ended = [call for call in self.calls if call.over]
        marks = [mark for call in ended for mark in (call.posted, *call.over)]
        _, *times, _ = clock.elapsed([self.marks[0], *marks, self.marks[-1]])
        each = iter(times)
        return [(next(each), max(next(each) for _ in call.over)) for call in ended]


class TimeMarks:
    """Marks when one rank's loop parts, pipeline instructions and waits begin and end.

    Implements `triaxis.engine.comm.ledger.WaitObserver`. No step is marked before `begin`.
    """

    def __init__(self, clock: "Clock") -> None:
        self.clock = clock
        self._step = 0
        self._part = StepPart.OTHER
        self._instruction: Instruction | None = None
        self._running: MarkedStep | None = None
        self._ended: deque[MarkedStep] = deque()

    def begin(self, steps_made: int, *, is_marked: bool) -> None:
        """Begin step `steps_made` + 1, which gets marks if `is_marked`. Marks that were not taken are dropped."""
        self._ended.clear()
        self._part, self._instruction = StepPart.OTHER, None
        self._start(steps_made + 1, is_marked)

    def enter(self, part: StepPart) -> None:
        """End the running activity, and begin one in `part`, outside any instruction."""
        self._part, self._instruction = part, None
        self._switch(None)

    def instruction(self, instruction: Instruction | None) -> None:
        """Record that the executor begins `instruction`, or None after the last one."""
        self._instruction = instruction
        self._switch(None)

    def under_way(self, posted: Event, handles: Sequence[Any]) -> None:
        """Mark a context-parallel call's post and each handle's end, during forward and backward."""
        running = self._running
        if running is None or posted.axis != "cp" or self._part is not StepPart.FORWARD_BACKWARD:
            return
        call = CallMarks(self.clock.mark(), [])
        running.calls.append(call)
        for handle in handles:
            handle.get_future().add_done_callback(lambda _: call.over.append(self.clock.mark()))

    def wait_begins(self, posted: Event) -> None:
        """End the running activity, and begin a wait for the call `posted`."""
        self._switch(posted)

    def wait_ends(self) -> None:
        """End the wait, and go on with the part and instruction that it interrupted."""
        self._switch(None)

    def read_begins(self, mark: Event) -> None:
        """End the running activity, and begin a wait for the host read `mark`."""
        self._switch(mark)

    def read_ends(self) -> None:
        """End the wait for a host read. Go on with the part and instruction that it interrupted."""
        self._switch(None)

    def end_step(self, *, next_is_marked: bool) -> None:
        """End the running step and begin the next one, at the same mark."""
        self._part, self._instruction = StepPart.OTHER, None
        mark = None
        if self._running is not None:
            mark = self.clock.mark()
            self._running.marks.append(mark)
            self._ended.append(self._running)
        self._start(self._step + 1, next_is_marked, mark)

    def take(self, step: int) -> MarkedStep | None:
        """Remove and return the marks of step `step`, counted from 1, and drop earlier ones. None if the step was not marked."""
        while self._ended and self._ended[0].step <= step:
            ended = self._ended.popleft()
            if ended.step == step:
                return ended
        return None

    def close(self) -> None:
        """Stop marking, and drop the unfinished step. Ended steps can still be taken."""
        self._running = None

    def _start(self, step: int, is_marked: bool, mark: Any = None) -> None:
        self._step = step
        self._running = MarkedStep(step) if is_marked else None
        self._switch(None, mark)

    def _switch(self, wait: Event | None, mark: Any = None) -> None:
        """Begin an activity in the current loop part and instruction, at `mark` or now.

        The activity is a wait for `wait`, or work if None.
        """
        running = self._running
        if running is not None:
            running.marks.append(self.clock.mark() if mark is None else mark)
            running.activities.append(Activity(self._part, self._instruction, wait))
