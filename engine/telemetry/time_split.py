"""Where the time of a step goes, to 100 %: the marks of every rank, added up and told apart (no torch here).

    compute        actions of the schedule, less what is waited for in them
    exposed_tp     waits for tensor-parallel calls, the cross-entropy's too
    bubble         waits for another stage: for an input, and at the end of the step until the slowest stage is through
    exposed_pp     posting of transfers, and waits until the last sends have left
    exposed_dp     waits for gradients to be reduced (sums of replicated parameters too), and for parameters to be gathered
    optimizer      norm, clipping, update; posting of the gathers
    data           reading and copying the next global batch
    checkpoint     what saving stops
    other          everything else: reading and writing down numbers, Python between two actions, the step's agreement

`bubble` is measured. Beside it stands the schedule's: what the simulator says of the same schedule with the measured durations of
its forwards and backwards per stage, every transfer free. What is measured beyond it is transfers that came too late, and actions
that did not always take the same time.

The end of a step. All ranks meet in its small all-reduce (first and last stage of tied embeddings already before). A rank whose
stage is through early waits there. It waits for other stages as long as their pipeline ran longer than its own, and not longer than
it waited more than the rank that waited least; that is bubble. The rest is `other`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Any, Literal, get_args

from engine.pipeline.actions import Action, Kind, Schedule
from engine.pipeline.lowering import Post
from engine.pipeline.simulate import Costs, Timeline, simulate
from engine.telemetry.marks import Doing, Waited
from engine.telemetry.timers import VALIDATION

Part = Literal[
    "compute",
    "exposed_tp",
    "bubble",
    "exposed_pp",
    "exposed_dp",
    "optimizer",
    "data",
    "checkpoint",
    "other",
]
PARTS: tuple[Part, ...] = get_args(Part)
"""In the order in which they are shown."""

_INPUT, _END = "input_wait", "end_wait"
_KNOWN = tuple(part for part in PARTS if part != "bubble")
_SPANS = (*_KNOWN, _INPUT, _END)
"""What a rank can tell by itself; the bubble takes all ranks."""

_USUAL, _PIPELINE, _ACTIONS = range(len(_SPANS), len(_SPANS) + 3)
"""Where in `Tally.numbers` the median of compute stands, the length of the pipeline, and the first duration of an action."""

_KINDS = ((Kind.F,), (Kind.B, Kind.I), (Kind.W,))
"""Actions whose durations are told apart, as the simulator's costs are: a schedule has B, or I and W."""


def span_of(doing: Doing) -> str | None:
    """Which of `_SPANS` what a rank does belongs to; None: to no step."""
    phase, instruction, wait = doing
    if phase == VALIDATION:
        return None
    if phase not in ("forward_backward", "optimizer"):
        return phase if phase in ("data", "checkpoint") else "other"
    if wait is not None:
        return _span_of_wait(wait)
    if phase == "optimizer":
        return "optimizer"
    if instruction is None:
        return "other"
    return "exposed_pp" if isinstance(instruction, Post) else "compute"


def _span_of_wait(wait: Waited) -> str:
    if wait.axis in ("pp_forward", "pp_backward"):
        return _INPUT if wait.op == "recv" else "exposed_pp"
    if wait.axis in ("world", "ends"):
        return _END
    return "exposed_tp" if wait.axis == "tp" and wait.purpose != "second sum" else "exposed_dp"


class Tally:
    """What one rank did over some steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._seconds = dict.fromkeys(_SPANS, 0.0)
        self._pipeline_seconds = 0.0
        self._compute_seconds: list[float] = []
        self._actions: dict[tuple[int, Kind], list[float]] = {}

    def add(self, step: int, doings: Sequence[Doing], times: Sequence[float]) -> None:
        """One step: what was done between `times[i]` and `times[i + 1]`, in seconds."""
        self.steps.append(step)
        computed = self._seconds["compute"]
        before = None
        for place, doing in enumerate(doings):
            seconds = times[place + 1] - times[place]
            span = span_of(doing)
            if span is None:
                continue
            self._seconds[span] += seconds
            instruction = doing.instruction
            if instruction is None:
                continue
            self._pipeline_seconds += seconds
            if isinstance(instruction, Action) and span != _INPUT:
                total = self._actions.setdefault((instruction.chunk, instruction.kind), [0.0, 0.0])
                total[0] += seconds
                total[1] += instruction is not before
                before = instruction
        self._compute_seconds.append(self._seconds["compute"] - computed)

    def numbers(self, vpp: int) -> list[float]:
        """Means per step and per action, and the median of what was computed in a step; as many for every rank."""
        spans = [self._seconds[span] / len(self.steps) for span in _SPANS]
        actions = []
        for chunk in range(vpp):
            for kinds in _KINDS:
                totals = [self._actions.get((chunk, kind), (0.0, 0.0)) for kind in kinds]
                count = sum(total[1] for total in totals)
                actions.append(sum(total[0] for total in totals) / count if count else 0.0)
        return [*spans, median(self._compute_seconds), self._pipeline_seconds / len(self.steps), *actions]


@dataclass(frozen=True)
class TimeSplit:
    """Mean times per step, over some steps of all ranks.

    Attributes:
        first_step, last_step: that were measured, counted from 1.
        ranks: seconds by part, a mapping per rank; each adds up to that rank's step.
        schedule_bubbles: seconds per rank that the schedule itself waits, with the measured durations of its actions.
        usual_compute: seconds per rank that it computes in the median step: one that was held up does not change it.
    """

    first_step: int
    last_step: int
    ranks: tuple[Mapping[Part, float], ...]
    schedule_bubbles: tuple[float, ...]
    usual_compute: tuple[float, ...]

    @cached_property
    def seconds(self) -> dict[Part, float]:
        """By part, the mean over the ranks."""
        return {part: fmean(rank[part] for rank in self.ranks) for part in PARTS}

    @property
    def step_seconds(self) -> float:
        """Of a step, the mean over the ranks: the sum of `seconds`."""
        return sum(self.seconds.values())

    @property
    def schedule_bubble(self) -> float:
        """The mean over the ranks, in seconds."""
        return fmean(self.schedule_bubbles)

    @property
    def shares(self) -> dict[Part, float]:
        """`seconds` over `step_seconds`: they add up to 1."""
        return {part: seconds / self.step_seconds for part, seconds in self.seconds.items()}

    def to_record(self) -> dict[str, Any]:
        """As a JSON object; of the ranks, the one whose median step computes longest."""
        slowest = max(range(len(self.ranks)), key=lambda rank: self.usual_compute[rank])
        return {
            "first_step": self.first_step,
            "last_step": self.last_step,
            "step_seconds": self.step_seconds,
            **{f"{part}_seconds": seconds for part, seconds in self.seconds.items()},
            "schedule_bubble_seconds": self.schedule_bubble,
            "slowest_rank": slowest,
            "slowest_compute_seconds": self.usual_compute[slowest],
        }

    def __str__(self) -> str:
        """One line: `compute 61%  tp 12%  bubble 14% (schedule 13%)  other 13%`, without what is below half a percent."""
        words = []
        for part, share in self.shares.items():
            name = part.removeprefix("exposed_")
            beside = ""
            if part == "bubble" and self.schedule_bubble:
                beside = f" (schedule {self.schedule_bubble / self.step_seconds:.0%})"
            if share >= 0.005 or beside:
                words.append(f"{name} {share:.0%}{beside}")
        return "  ".join(words)


def work_out(
    rows: Sequence[Sequence[float]], stage_ranks: Sequence[int], schedule: Schedule, first_step: int, last_step: int
) -> TimeSplit:
    """The split of some steps, from what every rank told.

    Args:
        rows: `Tally.numbers`, a row per rank.
        stage_ranks: the pipeline coordinate of each rank.
        schedule: that they ran.
        first_step, last_step: that were measured.
    """
    spans = [dict(zip(_SPANS, row, strict=False)) for row in rows]
    pp = schedule.placement.pp
    drains = [0.0] * len(rows)
    schedule_bubbles = drains
    if pp > 1:
        pipelines = [row[_PIPELINE] for row in rows]
        shortest = min(span[_END] for span in spans)
        drains = [min(span[_END] - shortest, max(pipelines) - own) for span, own in zip(spans, pipelines, strict=True)]
        ideal = _simulated(rows, stage_ranks, schedule)
        schedule_bubbles = [ideal.span - ideal.busy(rank) for rank in stage_ranks]
    ranks = []
    for span, drain in zip(spans, drains, strict=True):
        parts: dict[Part, float] = {part: span[part] if part != "bubble" else span[_INPUT] + drain for part in PARTS}
        parts["other"] += span[_END] - drain
        ranks.append(parts)
    usual = tuple(row[_USUAL] for row in rows)
    return TimeSplit(first_step, last_step, tuple(ranks), tuple(schedule_bubbles), usual)


def _simulated(rows: Sequence[Sequence[float]], stage_ranks: Sequence[int], schedule: Schedule) -> Timeline:
    """The schedule with the mean durations of each stage's actions, over the ranks that hold it."""
    placement = schedule.placement

    def mean(stage: int, kind: int) -> float:
        place = _ACTIONS + placement.chunk_of(stage) * len(_KINDS) + kind
        rank = placement.rank_of(stage)
        return fmean(row[place] for row, each in zip(rows, stage_ranks, strict=True) if each == rank)

    forward, backward, weight_grad = (
        [mean(stage, kind) for stage in range(placement.num_stages)] for kind in range(len(_KINDS))
    )
    return simulate(schedule, Costs(forward, backward, weight_grad))
