"""Reports which rank waits for which in a hang, and the likely cause.

    rank 13   F of microbatch 7, waits for a receive over pp_forward  ->  rank 9
    rank 12   in an all-reduce over tp that 13 has not entered        ->  rank 13
    rank 9    in the optimizer, waits for no rank, does not answer    <-  the cause: all others wait for it

A rank in a collective waits for the group members that are not in the same call. The likely cause is a rank that others wait for
and that waits for no rank. If no rank is like that, the ranks wait for each other in a circle, or a call with all its ranks does
not end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from triaxis.engine.comm.ledger import NO_PEER
from triaxis.engine.layout.rank_grid import RankGrid
from triaxis.engine.pipeline.actions import Action, Schedule
from triaxis.engine.pipeline.lowering import feeding_transfer
from triaxis.engine.resilience.hang.heartbeat import Beat
from triaxis.engine.run.step_parts import StepPart

_SHOWN = 12
"""Largest number of ranks that are described one by one."""

_PARTS = ("", StepPart.DATA, StepPart.FORWARD_BACKWARD, StepPart.OPTIMIZER, StepPart.VALIDATION, StepPart.CHECKPOINT)
"""Parts of a step, in order."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The last known activity of one rank.

    Attributes:
        beat: the rank's heartbeat; None if no rank has seen one.
        answers: whether the rank itself wrote this status; if not, another rank on its node read the rank's heartbeat.
        still_seconds: time for which the rank has not moved; 0.0 if unknown.
        where: the rank's host, process and GPU, in words.
    """

    rank: int
    beat: Beat | None
    answers: bool
    still_seconds: float = 0.0
    where: str = ""


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Facts about a run that do not change: ranks, groups, schedules.

    Attributes:
        grid: rank grid.
        groups: rank groups, by axis (`triaxis.engine.layout.axis_groups.axis_groups`).
        train_schedule: pipeline schedule of a training step.
        forward_schedule: pipeline schedule of a validation.
    """

    grid: RankGrid
    groups: Mapping[str, Sequence[tuple[int, ...]]]
    train_schedule: Schedule
    forward_schedule: Schedule


class HangReport:
    """Finds which rank waits for which in one hang, and the likely cause, and puts both into words.

    Args:
        statuses: every rank's status, in rank order.
    """

    def __init__(self, layout: RunLayout, statuses: Sequence[RankStatus]) -> None:
        self._layout = layout
        self._statuses = statuses
        self._group_of: dict[str, dict[int, tuple[int, ...]]] = {}
        self._missing: dict[tuple[Any, ...], list[int]] = {}
        self._targets = [self._waits_for(each) for each in statuses]

    @cached_property
    def culprits(self) -> list[int]:
        """The ranks that probably cause the hang.

        These are the ranks that do not answer. If all answer, they are the ranks that others wait for and that wait for none. If
        there are none of these either, they are the ranks that have come least far: in the earliest step, and in its earliest part
        (such as data or optimizer). The list is empty if ranks only wait for each other, or if all have come equally far.
        """
        waited_for = {target for targets in self._distinct_targets() for target in targets}
        silent = [each.rank for each in self._statuses if not each.answers]
        return silent or [rank for rank in sorted(waited_for) if not self._targets[rank]] or self._behind()

    def _behind(self) -> list[int]:
        """List the ranks that have come least far: by step, then by `StepPart`.

        [] if a host waits for another rank, which then explains the hang, or if all have come equally far.
        """
        if any(self._targets):
            return []
        places = [_place(each.beat) for each in self._statuses]
        return [rank for rank, place in enumerate(places) if place == min(places)] if len(set(places)) > 1 else []

    @property
    def step(self) -> int:
        """Step, counted from 1, that the furthest rank is in; 0 if no rank was seen."""
        return max((each.beat.step for each in self._statuses if each.beat is not None), default=0)

    def headline(self) -> str:
        """Describe the cause in one sentence."""
        culprits = self.culprits
        if culprits:
            return "; ".join(self._about_culprit(rank) for rank in culprits[:_SHOWN])
        circle = self._circle()
        if circle:
            return "ranks wait for each other in a circle: " + ", ".join(self._waiting(rank) for rank in circle)
        if any(each.beat is not None and each.beat.op for each in self._statuses):
            broken = "every rank is in the same call as its peers and it does not end: a link or the backend has failed"
            return "; ".join([broken, *self._calls_between_nodes()])
        return "no rank waits for another on its host: the devices do not finish (NCCL's flight record shows where)"

    def text(self) -> str:
        """Format the report: step and time, the headline, waiting ranks nearest to the cause first, then the others."""
        still = max((each.still_seconds for each in self._statuses), default=0.0)
        lines = [
            f"the run hangs in step {self.step:,}: nothing has moved for {still:.0f} seconds.",
            f"  {self.headline()}",
        ]
        waiting = [rank for rank, targets in enumerate(self._targets) if targets]
        # Nearest to the cause first: ranks that wait for it, and for few others.
        culprits = set(self.culprits)
        is_near = {id(targets): not culprits.isdisjoint(targets) for targets in self._distinct_targets()}
        waiting.sort(key=lambda rank: (not is_near[id(self._targets[rank])], len(self._targets[rank]), rank))
        lines += [f"  {self._waiting(rank)}" for rank in waiting[:_SHOWN]]
        if len(waiting) > _SHOWN:
            lines.append(f"  and {len(waiting) - _SHOWN} more ranks wait for these")
        idle = [each.rank for each in self._statuses if not self._targets[each.rank] and each.rank not in culprits]
        lines += [
            f"  {self.name(rank)} {self._where(self._statuses[rank])}{self._in_call(rank)}" for rank in idle[:_SHOWN]
        ]
        return "\n".join(lines)

    def name(self, rank: int) -> str:
        """Name a rank: `rank 13 (pp 3, dp 0, tp 1; node1, pid 4711, GPU 5)`."""
        where = f"; {self._statuses[rank].where}" if self._statuses[rank].where else ""
        return f"rank {rank} ({self._layout.grid.coordinates(rank)}{where})"

    def _about_culprit(self, rank: int) -> str:
        status = self._statuses[rank]
        if status.answers:
            return (
                f"{self.name(rank)} {self._where(status)} for {status.still_seconds:.0f} seconds, and waits for nobody"
            )
        if status.beat is None:
            return f"{self.name(rank)} does not answer, and nobody has seen what it was doing"
        return f"{self.name(rank)} does not answer; it was last seen {self._where(status).removeprefix('is ')}"

    def _waits_for(self, status: RankStatus) -> list[int]:
        beat = status.beat
        if not status.answers or beat is None or not beat.op:
            return []
        group = self._group(status.rank, beat.axis)
        if beat.peer != NO_PEER:
            return [group[beat.peer]] if beat.peer < len(group) else []
        # All ranks in this call share the answer: looking it up for each would take quadratic time.
        call = (beat.axis, group[:1], beat.op, beat.purpose, beat.step)
        if call not in self._missing:
            self._missing[call] = [rank for rank in group if not self._is_in(rank, beat)]
        return self._missing[call]

    def _distinct_targets(self) -> list[list[int]]:
        """List each rank's list of the ranks that it waits for. A list that several ranks share comes once."""
        return list({id(targets): targets for targets in self._targets}.values())

    def _is_in(self, rank: int, call: Beat) -> bool:
        """Whether `rank` waits in the same call as another rank, whose beat is `call`.

        False if `rank` did not write its own status.
        """
        status = self._statuses[rank]
        beat = status.beat
        return (
            status.answers
            and beat is not None
            and (beat.op, beat.axis, beat.purpose, beat.step) == (call.op, call.axis, call.purpose, call.step)
        )

    def _calls_between_nodes(self) -> list[str]:
        """Describe the calls that span several nodes, each call once."""
        grid, told = self._layout.grid, dict[str, None]()
        for beat in (each.beat for each in self._statuses if each.beat is not None and each.beat.op):
            nodes: dict[int, list[int]] = {}
            for rank in self._group(beat.rank, beat.axis):
                nodes.setdefault(grid.node(rank), []).append(rank)
            if len(nodes) > 1:
                shown = [f"node {node} (ranks {_list(ranks)})" for node, ranks in list(nodes.items())[:_SHOWN]]
                told[f"the {beat.op} over {beat.axis} ({beat.purpose}) is between {' and '.join(shown)}"] = None
        return list(told)[:_SHOWN]

    def _group(self, rank: int, axis: str) -> tuple[int, ...]:
        if axis not in self._group_of:
            groups = self._layout.groups.get(axis, ())
            self._group_of[axis] = {member: group for group in groups for member in group}
        return self._group_of[axis].get(rank, ())

    def _waiting(self, rank: int) -> str:
        """Describe a wait: `rank 13 (pp 3, dp 0, tp 1) waits for the forward of microbatch 7 from rank 9`."""
        beat = self._statuses[rank].beat
        assert beat is not None, "who waits was seen"
        targets = self._targets[rank]
        if beat.op == "recv":
            action = self._action(beat)
            pp = self._layout.grid.coordinates(rank).pp
            transfer = None if action is None else feeding_transfer(self._schedule(beat), pp, action)
            passed = "forward" if beat.axis == "pp_forward" else "backward"
            what = beat.purpose if transfer is None else f"the {passed} of microbatch {transfer.microbatch}"
            return f"{self.name(rank)} waits for {what} from rank {targets[0]}"
        if beat.op == "send":
            return f"{self.name(rank)} waits until rank {targets[0]} takes its {beat.purpose}"
        ranks = f"rank {targets[0]}" if len(targets) == 1 else f"ranks {_list(targets)}"
        where = self._where(self._statuses[rank]).removeprefix("is ")
        return f"{self.name(rank)} waits for {ranks} in the {beat.op} over {beat.axis} ({beat.purpose}), {where}"

    def _in_call(self, rank: int) -> str:
        """Describe the call in which a rank waits with all its peers. "" if the rank waits in no call."""
        beat = self._statuses[rank].beat
        return (
            ""
            if beat is None or not beat.op
            else f", in the {beat.op} over {beat.axis} ({beat.purpose}) with its peers"
        )

    def _where(self, status: RankStatus) -> str:
        """Describe where a rank is: `is in the forward of microbatch 7 of step 412`."""
        beat = status.beat
        if beat is None:
            return "was not seen"
        if beat.part == StepPart.DATA and beat.building:
            return f"is building the order of an epoch for step {beat.step:,}"
        if beat.part == StepPart.DATA:
            return f"is reading the data of step {beat.step:,}"
        if beat.part == StepPart.FORWARD_BACKWARD and (action := self._action(beat)) is not None:
            chunk = f", chunk {action.chunk}," if self._layout.grid.sizes.vpp > 1 else ""
            return f"is in the {action.kind.words} of microbatch {action.microbatch}{chunk} of step {beat.step:,}"
        if beat.part == StepPart.FORWARD_BACKWARD:
            return f"is between forwards and backwards of step {beat.step:,}"
        if beat.part in (StepPart.VALIDATION, StepPart.CHECKPOINT):
            return f"is in the {beat.part} after step {beat.step:,}"
        return f"is in the {beat.part} of step {beat.step:,}" if beat.part else "is not in a step yet"

    def _schedule(self, beat: Beat) -> Schedule:
        return self._layout.forward_schedule if beat.part == StepPart.VALIDATION else self._layout.train_schedule

    def _action(self, beat: Beat) -> Action | None:
        """Find the action that a rank is running, or None."""
        actions = self._schedule(beat).actions[self._layout.grid.coordinates(beat.rank).pp]
        return actions[beat.position - 1] if 0 < beat.position <= len(actions) else None

    def _circle(self) -> list[int]:
        """Find ranks that wait for each other in a circle; [] if there are none."""
        for start, targets in enumerate(self._targets):
            path = [start]
            while targets:
                rank = targets[0]
                if rank in path:
                    return path[path.index(rank) :]
                path.append(rank)
                targets = self._targets[rank]
        return []


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:_SHOWN])) + (" .." if len(ranks) > _SHOWN else "")


def _place(beat: Beat | None) -> tuple[int, int]:
    """Measure how far a rank has come, as (step, index of its part in `_PARTS`)."""
    if beat is None:
        return (0, 0)
    return (beat.step, _PARTS.index(beat.part) if beat.part in _PARTS else len(_PARTS))
