"""Splits a step's time into parts that add up to 100 %.

    compute        the schedule's actions, less the waits inside them
    exposed_tp     waits for tensor-parallel calls, including those of the cross-entropy
    exposed_cp     waits for the other context-parallel ranks' keys and values, and for sums of their gradients
    exposed_ep     waits for tokens sent to experts and back, for row counts, and for sums over the ranks that share a sample
    host_read      waits of the host for numbers from the device, such as row counts
    bubble         idle time that would remain if messages took no time
    exposed_pp     posting pipeline messages, waits beyond the bubble, and waits until the last sends have left
    exposed_dp     waits for gradients to be reduced and for parameters to be gathered
    optimizer      gradient norm, clipping, update, and posting the parameter gathers
    data           reading and copying the next global batch
    checkpoint     time for which saving stops training
    other          everything else, such as recording numbers, Python between two actions, and calls over all ranks

`StepTally` adds up one rank's times. `TimeSplit` holds all ranks' means. Bubble and exposed_pp are separated on the rank that has
all ranks' times (`triaxis.engine.telemetry.timing.bubble`).

`hidden_cp` is not one of these parts. It is the time in which a context-parallel call ran while the rank waited for no such call. A
call runs from its post to its end, queue time included. exposed_cp and hidden_cp add up to the time in which at least one call ran.
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
"""Parts, in the order in which they are printed."""

INPUT_WAIT, ENDS_WAIT, END_WAIT = "input_wait", "ends_wait", "end_wait"
HIDDEN_CP = "hidden_cp"
SPANS = (*(part for part in PARTS if part != "bubble"), INPUT_WAIT, ENDS_WAIT, END_WAIT, HIDDEN_CP)
"""Spans that a rank measures by itself: all parts but the bubble, which needs all ranks' times, and four more.

`input_wait` is time in which a rank waits for pipeline messages. In `ends_wait` first and last stage wait for each other (tied
embeddings), in `end_wait` all ranks at the end of the step. `hidden_cp` overlaps the other spans.
"""

USUAL = len(SPANS)
"""Index of the median compute time in `StepTally.numbers`. After it come the steps, each as `PipelineStep.numbers`."""


def span_of(activity: Activity) -> str | None:
    """Name the span in `SPANS` to which an activity's time is added. None for validation, which belongs to no step."""
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
"""Start and end in seconds; the end is not included."""


def seconds_without(inside: Sequence[Interval], outside: Sequence[Interval]) -> float:
    """Compute the seconds covered by `inside` but not by `outside`. No interval may end before it starts."""
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
    """One rank's pass through the pipeline in one step. Times are in seconds, moments from the step's first mark.

    Attributes:
        begin: moment at which the rank's first instruction began.
        through: moment at which the rank's last instruction was done.
        met: moment at which the rank left the step's last call over all ranks.
        end_wait: the rank's wait in that last call.
        ends_wait: the rank's wait in the tied embeddings' gradient sum over first and last stage, before that last call.
        tp_wait, cp_wait: the rank's waits for tensor-parallel and for context-parallel calls.
        waits: each action's wait for its input, in order.
        durations: each action's duration, in order, with all waits but the one for its input.
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
        """List the fields in the order of `STEP_NUMBERS`, then `waits`, then `durations`, in seconds.

        `begin` and `through` are counted from `met`, the end of the last call over all ranks. `waits` and `durations` are padded
        with zeros to `num_actions`.
        """
        assert len(self.waits) <= num_actions, f"{len(self.waits)} actions of a schedule of {num_actions}"
        none = [0.0] * (num_actions - len(self.waits))
        moments = [self.begin - self.met, self.through - self.met]
        waits = [self.end_wait, self.ends_wait, self.tp_wait, self.cp_wait]
        return [*moments, *waits, *self.waits, *none, *self.durations, *none]


STEP_NUMBERS = ("begin", "through", "end_wait", "ends_wait", "tp_wait", "cp_wait")
"""Numbers at the beginning of `PipelineStep.numbers`, before those of the actions."""


class StepTally:
    """One rank's seconds in each activity (`SPANS`), added up over some training steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._seconds = dict.fromkeys(SPANS, 0.0)
        self._compute_seconds: list[float] = []
        self._pipeline: list[PipelineStep] = []

    def add(
        self, step: int, activities: Sequence[Activity], times: Sequence[float], calls: Sequence[Interval] = ()
    ) -> None:
        """Add one step.

        Args:
            step: step, counted from 1.
            activities: the rank's activities; `activities[i]` lasted from `times[i]` to `times[i + 1]`.
            times: seconds from the step's first mark, one more than `activities`.
            calls: start and end of each context-parallel call that ran during the step, on the same scale.
        """
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
        """List mean seconds for each of `SPANS`, then the median step's compute seconds.

        Then comes `PipelineStep.numbers` for each training step, padded to `num_actions` actions, so that all ranks' lists are
        equally long. If `num_actions` is 0, there is no pipeline, and these numbers are left out.
        """
        spans = [self._seconds[span] / len(self.steps) for span in SPANS]
        steps = [number for way in self._pipeline for number in way.numbers(num_actions)] if num_actions else []
        return [*spans, median(self._compute_seconds), *steps]


@dataclass(frozen=True)
class TimeSplit:
    """Mean times per step, over some steps on all ranks.

    Attributes:
        first_step, last_step: first and last measured step, counted from 1.
        ranks: seconds by part, one mapping per rank, which adds up to the rank's step time.
        schedule_bubbles: each rank's idle seconds if every action had its stage's mean duration.
        usual_compute: each rank's compute seconds in its median step.
        hidden_cp: each rank's seconds in which a context-parallel call ran while the rank waited for no such call; None without
            context parallelism.
    """

    first_step: int
    last_step: int
    ranks: tuple[Mapping[Part, float], ...]
    schedule_bubbles: tuple[float, ...]
    usual_compute: tuple[float, ...]
    hidden_cp: tuple[float, ...] | None = None

    @cached_property
    def seconds(self) -> dict[Part, float]:
        """Seconds per step in each of `PARTS`, such as "compute", averaged over ranks."""
        return {part: fmean(rank[part] for rank in self.ranks) for part in PARTS}

    @property
    def step_seconds(self) -> float:
        """Seconds per step, averaged over the ranks."""
        return sum(self.seconds.values())

    @property
    def schedule_bubble(self) -> float:
        """Mean of `schedule_bubbles` over the ranks, in seconds."""
        return fmean(self.schedule_bubbles)

    @property
    def shares(self) -> dict[Part, float]:
        """Parts as fractions of `step_seconds`, which add up to 1."""
        return {part: seconds / self.step_seconds for part, seconds in self.seconds.items()}

    def to_record(self) -> dict[str, Any]:
        """Convert to JSON with means over the ranks and the slowest rank's compute time."""
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
        """Format all but small parts, as in `compute 61%  tp 8%  cp 4% (12 ms, 9 hidden)  bubble 14% (schedule 13%)`."""
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
