"""Splits pipeline waits, from all ranks' numbers, into the bubble and the cost of messages.

    rank 0  |F0|F1|.......|B0|...            measured     the previous stage has not finished,
    rank 1  |~~~~|F0|B0|~~|F1|B1|                         or its message is on the way
    rank 0  |F0|F1|...|B0|...                replayed     the same actions with the same durations, order and beginnings,
    rank 1  |..|F0|B0|F1|B1|                              but every message arrives at once

**The replay.** A rank's wait in the replay is its `bubble`. The rest of its measured wait is `exposed_pp`. So a late message costs
exposed_pp at every stage that it delays, but no bubble. An action that took longer than usual causes bubble where others wait for
it. The replay needs neither synchronized clocks nor message times.

**When the ranks begin.** A pipeline's ranks begin a step at different moments. Each rank counts its moment from the step's last
all-reduce, which all ranks leave at nearly the same time.

**The end of a step.** Two calls end a step: the tied embeddings' gradient sum (first and last stage), then a call over all ranks.
A rank that finishes early waits there for its pipeline's last rank. The shortest wait is the calls' own time. This much of a
rank's wait counts as a wait for another stage:

    min(last rank's finish - this rank's finish, this rank's wait - shortest wait on any rank)

The rest of the wait is exposed_dp in the gradient sum, and `other` in the call over all ranks.

**Echoes.** The tp x cp ranks that share a stage get one message each. If one message is late, the other ranks wait for the late
rank in their next tensor- or context-parallel call. This wait is the late message's echo, with a length of

    min(longest input wait on a peer - this rank's input wait, this rank's action time - shortest action time on a peer)

The echo is subtracted from the action's duration, and from exposed_tp and exposed_cp in proportion to their sizes. Waits in calls
to experts stay exposed_ep, because such calls also connect replicas.

`schedule_bubbles` are simulated with each stage's mean forward and backward durations. If the measured bubble is larger, the
actions' durations vary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triaxis.engine.layout.rank_grid import Coordinates
from triaxis.engine.pipeline.actions import Kind, Output, Schedule
from triaxis.engine.pipeline.simulate import Costs, simulate
from triaxis.engine.telemetry.timing.time_split import (
    END_WAIT,
    ENDS_WAIT,
    HIDDEN_CP,
    INPUT_WAIT,
    PARTS,
    SPANS,
    STEP_NUMBERS,
    USUAL,
    Part,
    TimeSplit,
)

Seconds = NDArray[np.floating]

_KINDS = ((Kind.F,), (Kind.B, Kind.I), (Kind.W,))
"""Action kinds whose mean durations are computed separately, as the simulator's costs are. A schedule has either B, or I and W."""


def num_actions(schedule: Schedule) -> int:
    """Count the actions per step on the rank with most actions. The result is 0 if there is no pipeline."""
    return max(map(len, schedule.actions)) if schedule.placement.pp > 1 else 0


@dataclass(frozen=True, slots=True)
class _Waits:
    """Each rank's mean waits per step, in seconds; arrays are [ranks].

    Attributes:
        bubble: waits for another stage that would remain if messages took no time.
        late: other waits for another stage, caused by message times.
        tp_echo, cp_echo: waits in tensor- and in context-parallel calls for a peer whose pipeline message was late; they are part
            of `bubble` + `late`.
        drain: part of `bubble` + `late` at the end of the step.
        summed: waits in the tied embeddings' gradient sum, less `drain`.
        schedule: bubble simulated with mean action durations.
    """

    bubble: Seconds
    late: Seconds
    tp_echo: Seconds
    cp_echo: Seconds
    drain: Seconds
    summed: Seconds
    schedule: tuple[float, ...]


class Attribution:
    """Computes `TimeSplit`s from all ranks' measured times. `places` holds the ranks' coordinates, in rank order."""

    def __init__(self, schedule: Schedule, places: Sequence[Coordinates]) -> None:
        self._schedule = schedule
        self._places = places
        peers = sorted({(place.cp, place.tp) for place in places})
        rank_at = {(place.dp, place.pp, (place.cp, place.tp)): rank for rank, place in enumerate(places)}
        self._ranks = np.array(
            [
                [[rank_at[dp, pp, peer] for peer in peers] for pp in range(schedule.placement.pp)]
                for dp in range(1 + max(place.dp for place in places))
            ]
        )
        """[dp, pp, cp x tp]: ranks that hold a pipeline's stage together and meet in each action."""
        self._num_actions = num_actions(schedule)
        self._order = _order(schedule) if self._num_actions else []

    def work_out(self, rows: Seconds, first_step: int, last_step: int) -> TimeSplit:
        """Compute the split for steps `first_step` to `last_step`. `rows` [ranks, n] holds each rank's `StepTally.numbers`."""
        waits = self._causes(rows[:, USUAL + 1 :])
        ranks = []
        for rank, row in enumerate(rows[:, : len(SPANS)].tolist()):
            span = dict(zip(SPANS, row, strict=True))
            parts: dict[Part, float] = {part: span.get(part, 0.0) for part in PARTS}
            parts["bubble"] = float(waits.bubble[rank])
            parts["exposed_pp"] += float(waits.late[rank])
            parts["exposed_tp"] = max(parts["exposed_tp"] - float(waits.tp_echo[rank]), 0.0)
            parts["exposed_cp"] = max(parts["exposed_cp"] - float(waits.cp_echo[rank]), 0.0)
            parts["exposed_dp"] += float(waits.summed[rank])
            at_the_end = span[ENDS_WAIT] + span[END_WAIT]
            parts["other"] += max(at_the_end - float(waits.drain[rank] + waits.summed[rank]), 0.0)
            assert self._num_actions or span[INPUT_WAIT] == 0.0, "one stage waits for no other"
            ranks.append(parts)
        return TimeSplit(
            first_step,
            last_step,
            tuple(ranks),
            waits.schedule,
            tuple(rows[:, USUAL].tolist()),
            tuple(rows[:, SPANS.index(HIDDEN_CP)].tolist()) if any(place.cp for place in self._places) else None,
        )

    def _causes(self, steps: Seconds) -> _Waits:
        """Split the ranks' waits by cause (`_Waits`).

        `steps` is [ranks, steps x numbers]. A row is one rank's `PipelineStep.numbers`, step after step.
        """
        num_ranks, most = len(self._places), self._num_actions
        if not most:
            nothing = np.zeros(num_ranks)
            return _Waits(nothing, nothing, nothing, nothing, nothing, nothing, (0.0,) * num_ranks)
        told = steps.reshape(num_ranks, -1, len(STEP_NUMBERS) + 2 * most)[self._ranks]
        begin, through, end_wait, ends_wait, tp_wait, cp_wait = np.moveaxis(told[..., : len(STEP_NUMBERS)], -1, 0)
        waits, durations = told[..., len(STEP_NUMBERS) : -most], told[..., -most:]
        # All are [dp, pp, cp x tp, steps]; `waits` and `durations` have one more dim, the actions.
        echoes = np.minimum(waits.max(axis=2, keepdims=True) - waits, durations - durations.min(axis=2, keepdims=True))
        echo = echoes.sum(axis=-1)
        met_wait = tp_wait + cp_wait
        most_echo = np.minimum(echo, met_wait)
        tp_echo = most_echo * np.divide(tp_wait, met_wait, out=np.zeros_like(echo), where=met_wait > 0)
        echoes *= np.divide(most_echo, echo, out=np.zeros_like(echo), where=echo > 0)[..., None]
        computing = (durations - echoes).mean(axis=2)
        at_the_end = end_wait + ends_wait
        drain = np.minimum(
            at_the_end - at_the_end.min(axis=(0, 1, 2)), through.max(axis=(1, 2), keepdims=True) - through
        )
        waited = waits.sum(axis=-1) + most_echo + drain
        bubble = np.minimum(waited, self._replayed(begin.mean(axis=2), computing)[:, :, None])
        ideal = self._simulated(computing)
        return _Waits(
            bubble=self._by_rank(bubble),
            late=self._by_rank(waited - bubble),
            tp_echo=self._by_rank(tp_echo),
            cp_echo=self._by_rank(most_echo - tp_echo),
            drain=self._by_rank(drain),
            summed=self._by_rank(np.maximum(ends_wait - drain, 0.0)),
            schedule=tuple(ideal[place.pp] for place in self._places),
        )

    def _by_rank(self, seconds: Seconds) -> Seconds:
        """Average [dp, pp, cp x tp, steps] over the steps, and reorder to [ranks]."""
        result = np.empty(len(self._places))
        result[self._ranks] = seconds.mean(axis=-1)
        return result

    def _replayed(self, begin: Seconds, durations: Seconds) -> Seconds:
        """Replay the steps with messages that need no time. Return each stage's waits, [dp, pp, steps].

        `begin`, when each rank's first action begins, is [dp, pp, steps]. `durations` is [dp, pp, steps, actions].
        """
        durations = np.moveaxis(durations, -1, 0)
        now = [begin[:, rank] for rank in range(begin.shape[1])]
        ends: list[Seconds] = []
        for rank, number, feeding in self._order:
            start = now[rank] if feeding is None else np.maximum(now[rank], ends[feeding])
            now[rank] = start + durations[number, :, rank]
            ends.append(now[rank])
        span = np.maximum.reduce(now)
        bubble: Seconds = span[:, None] - begin - durations.sum(axis=0)
        return np.maximum(bubble, 0.0)

    def _simulated(self, durations: Seconds) -> list[float]:
        """Simulate the schedule with each stage's mean action durations. Return bubble seconds by pipeline index."""
        placement = self._schedule.placement

        def mean(stage: int, kinds: Sequence[Kind]) -> float:
            rank, chunk = placement.rank_of(stage), placement.chunk_of(stage)
            own = [
                number
                for number, action in enumerate(self._schedule.actions[rank])
                if action.chunk == chunk and action.kind in kinds
            ]
            return float(durations[:, rank][..., own].mean()) if own else 0.0

        forward, backward, weight_grad = (
            [mean(stage, kinds) for stage in range(placement.num_stages)] for kinds in _KINDS
        )
        timeline = simulate(self._schedule, Costs(forward, backward, weight_grad))
        return [timeline.span - timeline.busy(rank) for rank in range(placement.pp)]


def _order(schedule: Schedule) -> list[tuple[int, int, int | None]]:
    """List all pipeline ranks' actions, each after the action whose output it receives.

    An entry is (pipeline rank, index on that rank, list index of the feeding action). The list index is None if the action receives
    nothing.
    """
    placement = schedule.placement
    timeline = simulate(schedule, Costs.uniform(placement.num_stages))
    started = sorted(
        (interval.start, rank, number)
        for rank, row in enumerate(timeline.intervals)
        for number, interval in enumerate(row)
    )
    order: list[tuple[int, int, int | None]] = []
    made: dict[Output, int] = {}
    for _, rank, number in started:
        action = schedule.actions[rank][number]
        stage = placement.stage_of(rank, action.chunk)
        source = schedule.input_of(stage, action)
        order.append((rank, number, None if source is None else made[source]))
        if (output := schedule.output_of(stage, action)) is not None:
            made[output] = len(order) - 1
    return order
