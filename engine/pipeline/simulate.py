"""Times a schedule's events without devices.

    start(action) = max(end of the rank's action before it, end of the action that feeds it + transfer latency)

    rank 0 |F0|F1|   B0  |F2|   B1  | ...          busy
    rank 1    |F0|  B0   |F1|  B1   | ...          span = first start to last end; bubble = 1 - busy / span

A transfer between ranks takes `Costs.transfer`, and a hand-over within a rank takes no time. A transfer never blocks its sender,
and never waits for bandwidth. With measured durations, this gives the 1F1B bubbles in 2401.10241, table 5, to 4 digits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from triaxis.engine.errors import ScheduleError
from triaxis.engine.pipeline.actions import Action, Kind, Output, Schedule


@dataclass(frozen=True, slots=True)
class Costs:
    """Durations of actions, with one entry per stage.

    All durations have the same unit of time, such as seconds or forwards.

    Attributes:
        forward: duration of F.
        input_grad: duration of I.
        weight_grad: duration of W. A `B` takes input_grad + weight_grad.
        transfer: time between an action's end and its output's arrival on another rank.
    """

    forward: Sequence[float]
    input_grad: Sequence[float]
    weight_grad: Sequence[float]
    transfer: float = 0

    @classmethod
    def uniform(
        cls, num_stages: int, forward: float = 1, input_grad: float = 1, weight_grad: float = 1, transfer: float = 0
    ) -> "Costs":
        """Give every stage the same costs. By default, a backward takes twice as long as a forward."""
        return cls((forward,) * num_stages, (input_grad,) * num_stages, (weight_grad,) * num_stages, transfer)

    def of(self, kind: Kind, stage: int) -> float:
        """Look up how long an action of this kind takes on this stage."""
        if kind is Kind.F:
            return self.forward[stage]
        if kind is Kind.I:
            return self.input_grad[stage]
        if kind is Kind.W:
            return self.weight_grad[stage]
        return self.input_grad[stage] + self.weight_grad[stage]


class Interval(NamedTuple):
    """An action's start and end, in the costs' unit."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class SimulatedTimeline:
    """The intervals of all actions in a schedule, a row per pp rank, in order."""

    schedule: Schedule
    intervals: tuple[tuple[Interval, ...], ...]

    @cached_property
    def span(self) -> float:
        """The time from the first start (0) to the last end."""
        return max(row[-1].end for row in self.intervals)

    def busy(self, rank: int) -> float:
        """Sum the time in which the rank computes."""
        return sum(interval.end - interval.start for interval in self.intervals[rank])

    def bubble_fraction(self, rank: int) -> float:
        """Compute (span - busy) / span, the part of the span in which the rank waits.

        2401.10241, section 5.1, defines this fraction.
        """
        return 1 - self.busy(rank) / self.span

    @property
    def largest_bubble_fraction(self) -> float:
        """The bubble fraction on the rank that waits most."""
        return max(self.bubble_fraction(rank) for rank in range(len(self.intervals)))


def simulate(schedule: Schedule, costs: Costs) -> SimulatedTimeline:
    """Time every action in a schedule.

    Raises:
        ScheduleError: the costs are for a different number of stages, or actions wait for each other in a circle or for missing
            ones.
    """
    check_costs(costs, schedule.placement.num_stages)
    placement = schedule.placement
    last = placement.num_stages - 1
    stages_on = [placement.stages_on(rank) for rank in range(placement.pp)]
    rank_of = [placement.rank_of(stage) for stage in range(placement.num_stages)]
    seconds = {kind: [costs.of(kind, stage) for stage in range(placement.num_stages)] for kind in Kind}
    rows: list[list[Interval]] = [[] for _ in schedule.actions]
    # By (stage, is a forward, microbatch): a plain tuple, because a named one would be slow.
    produced: dict[tuple[int, bool, int], float] = {}
    # A rank runs until it needs an output that is not produced yet, and goes on once it is.
    waiting: dict[tuple[int, bool, int], int] = {}
    runnable = list(range(placement.pp))
    while runnable:
        rank = runnable.pop()
        row, stages = rows[rank], stages_on[rank]
        now = row[-1].end if row else 0.0
        for action in schedule.actions[rank][len(row) :]:
            kind, chunk, microbatch = action
            stage, is_forward = stages[chunk], kind is Kind.F
            # The same rule as `Schedule.input_of`.
            source = stage - 1 if is_forward else stage + 1
            if 0 <= source <= last and kind is not Kind.W:
                needed = source, is_forward, microbatch
                if needed not in produced:
                    waiting[needed] = rank
                    break
                arrival = produced[needed] + (0 if rank_of[source] == rank else costs.transfer)
                now = max(now, arrival)
            end = now + seconds[kind][stage]
            row.append(Interval(action, now, end))
            now = end
            if kind is not Kind.W:
                output = stage, is_forward, microbatch
                produced[output] = end
                if output in waiting:
                    runnable.append(waiting.pop(output))
    if waiting:
        stuck = {
            Output(stage, Kind.F if is_forward else Kind.B, microbatch): rank
            for (stage, is_forward, microbatch), rank in waiting.items()
        }
        raise ScheduleError(_stuck(schedule, rows, stuck))
    return SimulatedTimeline(schedule, tuple(tuple(row) for row in rows))


def check_costs(costs: Costs, num_stages: int) -> None:
    """Refuse costs that do not have `num_stages` entries.

    Raises:
        ScheduleError: the costs have a different number of entries.
    """
    for name in ("forward", "input_grad", "weight_grad"):
        durations = getattr(costs, name)
        if len(durations) != num_stages:
            raise ScheduleError(
                f"costs.{name} has {len(durations)} entries and the schedule {num_stages} stages (pp x vpp): a stage without "
                "a cost cannot be timed. Give one entry per stage, in stage order."
            )


def _stuck(schedule: Schedule, rows: Sequence[Sequence[Interval]], waiting: Mapping[Output, int]) -> str:
    lines = []
    for (stage, kind, microbatch), rank in sorted(waiting.items(), key=lambda item: item[1]):
        needed = "output" if kind is Kind.F else "input gradient"
        action = schedule.actions[rank][len(rows[rank])]
        lines.append(
            f"rank {rank} stops at {action}, which needs the {needed} of stage {stage}, microbatch {microbatch}"
        )
    return (
        f"the actions of schedule {schedule.name} wait for each other, or for actions that are not there: {'; '.join(lines)}. "
        "No order of execution exists, so it cannot be timed or lowered. `check` shows the place."
    )
