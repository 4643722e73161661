"""The parts of a step's time, adding up to 100 %: sums over each rank's activities, and their means over all ranks.

    compute        the schedule's actions, without the waits in them
    exposed_tp     waits for tensor-parallel calls, the cross-entropy's too
    exposed_cp     waits for the other context-parallel ranks' keys and values, and for sums of their gradients
    exposed_ep     waits for tokens on their way to experts and back, for row counts, and for the load within samples
    host_read      host reads for which a device stands still: row counts, ends of experts' rows
    bubble         idle time that would remain if messages took no time
    exposed_pp     cost of the pipeline's messages: posting, waits beyond the bubble, waits until the last sends have left
    exposed_dp     waits for gradients to be reduced (sums for replicated parameters too), and for parameters to be gathered
    optimizer      norm, clipping, update; posting the gathers
    data           reading and copying the next global batch
    checkpoint     time for which saving stops training
    other          everything else: reading and recording numbers, Python between two actions, the label sum, the agreement

A rank can measure that it waited for another stage, but not why. So bubble and exposed_pp are separated on the rank that has all
ranks' times (`triaxis.engine.telemetry.timing.bubble`). `StepTally` covers one rank, `TimeSplit` all ranks.

`hidden_cp` is not a part: it is time in which a context-parallel call was running and the rank did not wait for one. A call runs
from its post until it is over, including its turn after other calls. exposed_cp and hidden_cp add up to the calls' total time; two
calls that run together count once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Literal, get_args

from triaxis.engine.comm.ledger import HOST_READ, LABELS, REPLICA_GRADIENTS, Event
from triaxis.engine.pipeline.actions import Action
from triaxis.engine.pipeline.lowering import Post
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.telemetry.timing.marks import Activity

Part = Literal[
    "compute",
    "exposed_tp",
    "exposed_cp",
    "exposed_ep",
    "host_read",
    "bubble",
    "exposed_pp",
    "exposed_dp",
    "optimizer",
    "data",
    "checkpoint",
    "other",
]
PARTS: tuple[Part, ...] = get_args(Part)
"""Parts, in the order in which they are shown."""

INPUT_WAIT, ENDS_WAIT, END_WAIT = "input_wait", "ends_wait", "end_wait"
HIDDEN_CP = "hidden_cp"
SPANS = (*(part for part in PARTS if part != "bubble"), INPUT_WAIT, ENDS_WAIT, END_WAIT, HIDDEN_CP)
"""Spans that a rank measures by itself; the bubble needs all ranks. In `ends_wait` first and last stage meet (tied embeddings), in
`end_wait` all ranks at the end of the step. The last span overlaps others."""

USUAL = len(SPANS)
"""Index of the median compute time in `StepTally.numbers`; the steps follow, each as `PipelineStep.numbers`."""


def span_of(activity: Activity) -> str | None:
    """Find an activity's span in `SPANS`; None if it belongs to no step."""
    part, instruction, wait = activity
    if part is StepPart.VALIDATION:
        return None
    if part not in (StepPart.FORWARD_BACKWARD, StepPart.OPTIMIZER):
        return part if part in (StepPart.DATA, StepPart.CHECKPOINT) else StepPart.OTHER
    if wait is not None:
        return _span_of_wait(wait)
    if part is StepPart.OPTIMIZER:
        return "optimizer"
    if instruction is None:
        return "other"
    return "exposed_pp" if isinstance(instruction, Post) else "compute"


def _span_of_wait(wait: Event) -> str:
    if wait.op == HOST_READ:
        return "host_read"
    if wait.axis in ("pp_forward", "pp_backward"):
        return INPUT_WAIT if wait.op == "recv" else "exposed_pp"
    if wait.axis == "ends":
        return ENDS_WAIT
    if wait.axis == "world":
        return "other" if wait.purpose == LABELS else END_WAIT
    if wait.axis == "cp":
        return "exposed_cp"
    if wait.axis in ("experts", "sample"):
        return "exposed_ep"
    return "exposed_tp" if wait.axis == "tp" and wait.purpose != REPLICA_GRADIENTS else "exposed_dp"


Interval = tuple[float, float]
"""Seconds [start, stop)."""


def seconds_without(inside: Sequence[Interval], outside: Sequence[Interval]) -> float:
    """Measure the seconds covered by `inside` and not by `outside`; no interval may end before it starts."""
    edges = [(moment, step, 0) for interval in inside for moment, step in zip(interval, (1, -1), strict=True)]
    edges += [(moment, 0, step) for interval in outside for moment, step in zip(interval, (1, -1), strict=True)]
    total, before, num_inside, num_outside = 0.0, 0.0, 0, 0
    for moment, of_inside, of_outside in sorted(edges):
        if num_inside and not num_outside:
            total += moment - before
        before, num_inside, num_outside = moment, num_inside + of_inside, num_outside + of_outside
    return total


@dataclass(slots=True)
class PipelineStep:
    """One rank's pass through the pipeline in one step, in seconds; moments are on the scale of the step's marks.

    Attributes:
        begin: moment at which its first instruction began.
        through: moment at which its last instruction was done.
        met: moment at which it left the step's last meeting of all ranks.
        end_wait: wait in that meeting.
        ends_wait: wait before it, in the sum over first and last stage.
        tp_wait, cp_wait: waits for tensor-parallel and for context-parallel calls.
        waits: each action's wait for its input, in order.
        durations: each action's duration, in order, without the wait for its input but with other waits.
    """

    begin: float
    through: float
    met: float
    end_wait: float = 0.0
    ends_wait: float = 0.0
    tp_wait: float = 0.0
    cp_wait: float = 0.0
    waits: list[float] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)

    def numbers(self, num_actions: int) -> list[float]:
        """List `STEP_NUMBERS`, `waits` and `durations`, padded to `num_actions`; `begin` and `through` count from `met`."""
        assert len(self.waits) <= num_actions, f"{len(self.waits)} actions of a schedule of {num_actions}"
        none = [0.0] * (num_actions - len(self.waits))
        moments = [self.begin - self.met, self.through - self.met]
        waits = [self.end_wait, self.ends_wait, self.tp_wait, self.cp_wait]
        return [*moments, *waits, *self.waits, *none, *self.durations, *none]


STEP_NUMBERS = ("begin", "through", "end_wait", "ends_wait", "tp_wait", "cp_wait")
"""The numbers before the actions in `PipelineStep.numbers`."""


class StepTally:
    """One rank's times over some steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._seconds = dict.fromkeys(SPANS, 0.0)
        self._compute_seconds: list[float] = []
        self._pipeline: list[PipelineStep] = []

    def add(
        self, step: int, activities: Sequence[Activity], times: Sequence[float], calls: Sequence[Interval] = ()
    ) -> None:
        """Add one step: `activities[i]` lasted from `times[i]` to `times[i + 1]`, in seconds; `calls` are the running calls."""
        self.steps.append(step)
        spans = [span_of(activity) for activity in activities]
        waits = [between for span, between in zip(spans, pairwise(times), strict=True) if span == "exposed_cp"]
        # A gloo thread may finish a call before this rank has marked its post.
        lasting = [(start, stop) for start, stop in calls if stop > start]
        self._seconds[HIDDEN_CP] += seconds_without(lasting, waits)
        computed = self._seconds["compute"]
        way = PipelineStep(times[-1], times[-1], times[-1])
        has_begun, before = False, None
        for activity, span, (start, stop) in zip(activities, spans, pairwise(times), strict=True):
            if span is None:
                continue
            seconds = stop - start
            self._seconds[span] += seconds
            if span == END_WAIT:
                way.end_wait += seconds
                way.met = stop
            elif span == ENDS_WAIT:
                way.ends_wait += seconds
            instruction = activity.instruction
            # A step that is repeated between two steps, to find a non-finite value, is not part of the pipeline.
            if instruction is None or activity.part is not StepPart.FORWARD_BACKWARD:
                continue
            if not has_begun:
                has_begun, way.begin = True, start
            way.through = stop
            if span == "exposed_tp":
                way.tp_wait += seconds
            elif span == "exposed_cp":
                way.cp_wait += seconds
            if isinstance(instruction, Action):
                if instruction is not before:
                    way.waits.append(0.0)
                    way.durations.append(0.0)
                    before = instruction
                (way.waits if span == INPUT_WAIT else way.durations)[-1] += seconds
        self._compute_seconds.append(self._seconds["compute"] - computed)
        self._pipeline.append(way)

    def numbers(self, num_actions: int) -> list[float]:
        """List means per step, the median compute time and, unless `num_actions` is 0, the steps; as many on every rank."""
        spans = [self._seconds[span] / len(self.steps) for span in SPANS]
        steps = [number for way in self._pipeline for number in way.numbers(num_actions)] if num_actions else []
        return [*spans, median(self._compute_seconds), *steps]


@dataclass(frozen=True)
class TimeSplit:
    """Mean times per step, over some steps on all ranks.

    Attributes:
        first_step, last_step: first and last measured step, counted from 1.
        ranks: seconds by part, a mapping per rank; each adds up to that rank's step.
        schedule_bubbles: idle seconds per rank if every action took its stage's mean duration.
        usual_compute: seconds per rank that it computes in the median step; a single delayed step does not change it.
        hidden_cp: seconds per rank in which context-parallel calls were hidden; None without context parallelism.
    """

    first_step: int
    last_step: int
    ranks: tuple[Mapping[Part, float], ...]
    schedule_bubbles: tuple[float, ...]
    usual_compute: tuple[float, ...]
    hidden_cp: tuple[float, ...] | None = None

    @cached_property
    def seconds(self) -> dict[Part, float]:
        """Seconds by part, averaged over the ranks."""
        return {part: fmean(rank[part] for rank in self.ranks) for part in PARTS}

    @property
    def step_seconds(self) -> float:
        """Seconds per step, averaged over the ranks: the sum of `seconds`."""
        return sum(self.seconds.values())

    @property
    def schedule_bubble(self) -> float:
        """Mean of `schedule_bubbles` over the ranks, in seconds."""
        return fmean(self.schedule_bubbles)

    @property
    def shares(self) -> dict[Part, float]:
        """Parts as fractions of `step_seconds`; they add up to 1."""
        return {part: seconds / self.step_seconds for part, seconds in self.seconds.items()}

    def to_record(self) -> dict[str, Any]:
        """Convert to a JSON object. Single ranks are left out, except the one whose median step computes longest."""
        slowest = max(range(len(self.ranks)), key=lambda rank: self.usual_compute[rank])
        return {
            "first_step": self.first_step,
            "last_step": self.last_step,
            "step_seconds": self.step_seconds,
            **{f"{part}_seconds": seconds for part, seconds in self.seconds.items()},
            "schedule_bubble_seconds": self.schedule_bubble,
            **({} if self.hidden_cp is None else {"hidden_cp_seconds": fmean(self.hidden_cp)}),
            "slowest_rank": slowest,
            "slowest_compute_seconds": self.usual_compute[slowest],
        }

    def __str__(self) -> str:
        """Format `compute 61%  tp 8%  cp 4% (12 ms, 9 hidden)  bubble 14% (schedule 13%)  other 13%`, without parts below 0.5 %."""
        words = []
        for part, share in self.shares.items():
            name = part.removeprefix("exposed_").replace("_", " ")
            beside = ""
            if part == "bubble" and self.schedule_bubble:
                beside = f" (schedule {self.schedule_bubble / self.step_seconds:.0%})"
            if part == "exposed_cp" and self.hidden_cp is not None:
                hidden = fmean(self.hidden_cp)
                in_all = self.seconds[part] + hidden
                digits = 0 if in_all >= 0.01 else 1
                beside = f" ({1e3 * in_all:.{digits}f} ms, {1e3 * hidden:.{digits}f} hidden)"
            if share >= 0.005 or beside:
                words.append(f"{name} {share:.0%}{beside}")
        return "  ".join(words)
