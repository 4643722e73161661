"""The split of waits in a pipeline, from the numbers of all ranks: its bubble, and the cost of its messages.

    rank 0  |F0|F1|.......|B0|...            measured     a wait has two causes: the stage before is not through yet,
    rank 1  |~~~~|F0|B0|~~|F1|B1|                         or what it made is on its way
    rank 0  |F0|F1|...|B0|...                replayed     the same actions, each as long as it was, in the same order and begun
    rank 1  |..|F0|B0|F1|B1|                              as they were, and every message there at once

**The replay** needs no clocks that agree and no message's moments: what a rank waits in it is its `bubble`, whatever it waited
beyond that is `exposed_pp`. So a late message costs exposed_pp where it is late and at every stage that is late because of it,
and no bubble. A step is replayed by itself, with its own durations: an action that took longer than usual makes bubble behind it.

**Where the ranks begin.** The ranks of a pipeline begin a step at different moments (one had more to update, or to write
down). The moments have one zero: no rank leaves the step's last all-reduce before all have entered it, and all leave it
together, as nearly as such a small message is fast.

**The end of a step.** There a rank waits whose stage is through early: for its pipeline's last rank, as long as that came later,
and not longer than it waited more than the rank that waited least. This is a wait for another stage like others. What is waited
beyond it is exposed_dp in the sum over first and last stage (tied embeddings), and `other` in the agreement of all.

**Echoes.** The ranks of one stage of a replica (tp x cp) get one message each. One whose message is there goes on, and waits in its
next tensor- or context-parallel call for one whose message is late. As far as it waited less for its input than another, and
its action took longer, it waited for the message; this is taken out of the action, and of exposed_tp and exposed_cp in the
proportion in which the rank waited for the calls of both. Calls to experts also join replicas, so what they wait stays exposed_ep.

`schedule_bubbles` are the simulator's: mean durations of forwards and backwards per stage. The bubble that is measured beyond them
comes of actions that did not always take the same time.
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
"""Actions whose durations are kept separate, as the simulator's costs are: a schedule has B, or I and W."""


def num_actions(schedule: Schedule) -> int:
    """Return the number of actions in `StepTally.numbers`: of the rank that has most; 0 without a pipeline."""
    return max(map(len, schedule.actions)) if schedule.placement.pp > 1 else 0


@dataclass(frozen=True, slots=True)
class _Waits:
    """Means per step, in seconds.

    Attributes:
        bubble, late: [ranks], the two causes of waiting for another stage.
        tp_echo, cp_echo: [ranks], what of `late` and `bubble` was waited in tensor- and in context-parallel calls.
        drain: [ranks], and at the end of the step.
        summed: [ranks], what the sum over first and last stage took beyond `drain`.
        schedule: per rank, by the simulator.
    """

    bubble: Seconds
    late: Seconds
    tp_echo: Seconds
    cp_echo: Seconds
    drain: Seconds
    summed: Seconds
    schedule: tuple[float, ...]


class Attribution:
    """A maker of `TimeSplit`s from the numbers of all ranks, whose `places` are in their order."""

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
        """[dp, pp, cp x tp]: who holds a stage of a pipeline, and meets in each action."""
        self._num_actions = num_actions(schedule)
        self._order = _order(schedule) if self._num_actions else []

    def work_out(self, rows: Seconds, first_step: int, last_step: int) -> TimeSplit:
        """Compute the split of the steps from first to last, from `StepTally.numbers` of each rank as rows [ranks, n]."""
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
        """Return causes of the waits of `steps` [ranks, steps x numbers], `PipelineStep.numbers` one after the other."""
        num_ranks, most = len(self._places), self._num_actions
        if not most:
            nothing = np.zeros(num_ranks)
            return _Waits(nothing, nothing, nothing, nothing, nothing, nothing, (0.0,) * num_ranks)
        told = steps.reshape(num_ranks, -1, len(STEP_NUMBERS) + 2 * most)[self._ranks]
        begin, through, end_wait, ends_wait, tp_wait, cp_wait = np.moveaxis(told[..., : len(STEP_NUMBERS)], -1, 0)
        waits, durations = told[..., len(STEP_NUMBERS) : -most], told[..., -most:]
        # All are [dp, pp, cp x tp, steps], the last two with a dim of actions behind.
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
        """Return means [ranks] over the steps of [dp, pp, cp x tp, steps]."""
        result = np.empty(len(self._places))
        result[self._ranks] = seconds.mean(axis=-1)
        return result

    def _replayed(self, begin: Seconds, durations: Seconds) -> Seconds:
        """Return what each stage's rank waits [dp, pp, steps] where messages take no time.

        `begin` is [dp, pp, steps], `durations` [dp, pp, steps, actions].
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
        """Return the bubble of each pipeline rank in the schedule with the mean durations of each stage's actions."""
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
    """List the actions of all ranks, each after its feeder: rank, number on the rank, place of the feeder in this list."""
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
