"""The measured actions of one pipeline of a run, from what its ranks wrote (no torch here)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from triaxis.engine.errors import ScheduleError, TriaxisError
from triaxis.engine.pipeline.actions import Action, Kind, Schedule
from triaxis.engine.pipeline.simulate import Costs, Interval
from triaxis.engine.telemetry.timing.timeline import read_ranks

_FIRST_PIPELINE = re.compile(r"pp (\d+), dp 0(?:, cp 0)?, tp 0\b")


@dataclass(frozen=True)
class Measured:
    """One step of the pipeline whose ranks are the first of every other axis.

    Attributes:
        step: its number.
        rows: per pp rank, the intervals of its actions in seconds from the first action of all.
    """

    step: int
    rows: tuple[tuple[Interval, ...], ...]

    @property
    def span(self) -> float:
        """Return the seconds from the first start to the last end."""
        return max(row[-1].end for row in self.rows)

    def bubble_fraction(self, rank: int) -> float:
        """Return the part of the span in which the rank runs no action; waits inside of an action count as the action."""
        return 1 - sum(each.end - each.start for each in self.rows[rank]) / self.span

    def costs(self, schedule: Schedule) -> Costs:
        """Return the mean seconds of each stage's actions; a B counts as an input gradient, and transfers take nothing."""
        placement = schedule.placement

        def mean(stage: int, kinds: Sequence[Kind]) -> float:
            rank, chunk = placement.rank_of(stage), placement.chunk_of(stage)
            own = [
                each.end - each.start
                for each in self.rows[rank]
                if each.action.chunk == chunk and each.action.kind in kinds
            ]
            return fmean(own) if own else 0.0

        forward, backward, weight_grad = (
            [mean(stage, kinds) for stage in range(placement.num_stages)]
            for kinds in ((Kind.F,), (Kind.B, Kind.I), (Kind.W,))
        )
        return Costs(forward, backward, weight_grad)


def read_measured(run: Path, schedule: Schedule) -> Measured:
    """Read the last traced step of a run.

    Args:
        run: its directory.
        schedule: of its training step.

    Raises:
        TriaxisError: no timeline, or not every pipeline rank's.
        ScheduleError: the run's actions are not those of `schedule`.
    """
    rows: dict[int, list[dict[str, Any]]] = {}
    for content in read_ranks(run).values():
        names = (each["args"]["name"] for each in content["traceEvents"] if each.get("name") == "thread_name")
        if found := _FIRST_PIPELINE.search(next(names, "")):
            rows[int(found[1])] = content["traceEvents"]
    pp = schedule.placement.pp
    if missing := [str(rank) for rank in range(pp) if rank not in rows]:
        raise TriaxisError(
            f"{run} has no timeline of pipeline rank {', '.join(missing)} of dp 0, tp 0: without it the step has holes. The config "
            f"says pp {pp}; give that of the run, or trace a run whose ranks all write."
        )
    steps = [{each["name"]: each for each in rows[rank] if each.get("cat") == "step"} for rank in range(pp)]
    common = set.intersection(*(set(each) for each in steps))
    if not common:
        raise TriaxisError(f"{run} has no step that all pipeline ranks traced. Look when the traced steps are made.")
    name = max(common, key=lambda each: int(each.split()[-1]))
    found_rows = [_actions(rows[rank], steps[rank][name]) for rank in range(pp)]
    for rank, row in enumerate(found_rows):
        if tuple(each.action for each in row) != schedule.actions[rank]:
            raise ScheduleError(
                f"{run} measured other actions on pipeline rank {rank} than schedule {schedule.name} has with "
                f"{schedule.num_microbatches} microbatches: the rows cannot be compared. Give the config and the sizes of that run."
            )
    first = min(row[0].start for row in found_rows)
    return Measured(
        int(name.split()[-1]),
        tuple(tuple(Interval(each.action, each.start - first, each.end - first) for each in row) for row in found_rows),
    )


def _actions(events: Sequence[dict[str, Any]], step: dict[str, Any]) -> list[Interval]:
    """List the actions of one rank inside of a step, in seconds of the ranks' common clock."""
    until = step["ts"] + step["dur"]
    inside = [each for each in events if each.get("cat") == "action" and step["ts"] <= each["ts"] <= until]
    return [
        Interval(Action.parse(each["name"]), each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6)
        for each in sorted(inside, key=lambda each: float(each["ts"]))
    ]
