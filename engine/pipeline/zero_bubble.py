"""Builds schedules whose weight gradients fill the bubble.

rank 0 of 3, 1F1B     F0 F1 F2 ........ B0    F3 B1    ...       F: forward; B: I (input gradient) and W (weight gradients)
             ZB-H1    F0 F1 F2 ...... I0 W0   F3 I1 W1 ...

rank 0 of 2, ZBV      0F0 0F1 0F2 1F0 1I0 1W0 1F1 1I1 1W1 0F3 0I0 0W0 1F2 1I2 1W2 ...     chunk 0: stage 0, chunk 1: stage 3
rank 1                    0F0 1F0 0F1 1F1 1I0 1W0 0F2 0I0 0W0 1F2 1I1 1W1 ...             stages 1 and 2
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from triaxis.engine.pipeline.actions import Action, Kind, Placement, Schedule


def zb_h1(schedule: Schedule) -> Schedule:
    """Turn 1F1B into ZB-H1 (2401.10241, section 3 and figure 2).

    A rank sends its input gradient on before it computes its weight gradients. Rank r holds back the weight gradients of at most r
    microbatches. Microbatches in flight and held back are together at most p, the number of ranks.

        bubble = (p - 1)(T_F + T_B - T_W)          T_B is the time of an input gradient alone
    """
    rows = []
    for rank, actions in enumerate(schedule.actions):
        row: list[Action] = []
        held: list[Action] = []
        for action in actions:
            if action.kind is Kind.F:
                row.append(action)
                continue
            row.append(action._replace(kind=Kind.I))
            held.append(action._replace(kind=Kind.W))
            if len(held) > rank:
                row.append(held.pop(0))
        rows.append((*row, *held))
    return replace(schedule, name="zb_h1", actions=tuple(rows))


def zbv(pp: int, num_microbatches: int) -> Schedule:
    """Build the ZBV schedule (2401.10241, section 6), with p ranks and two stages per rank.

    A stage has half of a 1F1B stage's layers. Stages go from the first rank to the last and back, so the backward starts on the
    first. A rank's two stages together hold at most 2 p microbatches whose weight gradients are not computed yet. They take as much
    memory as p microbatches on 1F1B's first rank. If forward, input gradient and weight gradients take equally long, a rank idles
    for p - 1 forwards of a stage.

    Fewer than 2 p - 1 microbatches run the schedule for 2 p - 1, without the missing microbatches' actions.
    """
    most = max(2 * pp - 1, num_microbatches)
    rows = (tuple(a for a in _zbv_row(pp, rank, most) if a.microbatch < num_microbatches) for rank in range(pp))
    return Schedule("zbv", Placement(pp, 2, is_v=True), num_microbatches, False, tuple(rows))


def _zbv_row(pp: int, rank: int, num_microbatches: int) -> Iterator[Action]:
    """Yield one rank's ZBV actions in execution order; `num_microbatches` >= 2 pp - 1."""
    done: Counter[tuple[Kind, int]] = Counter()

    def each(chunk: int, *kinds: Kind) -> Iterator[Action]:
        for kind in kinds:
            yield Action(kind, chunk, done[kind, chunk])
            done[kind, chunk] += 1

    backward = (Kind.I, Kind.W)
    # Microbatch 0 takes 2 (p - rank) - 1 slots from here to the turn and back.
    for _ in range(2 * (pp - rank) - 1):
        yield from each(0, Kind.F)
    # It takes 2 rank + 1 more to the last stage and back as a gradient: forwards of both chunks fill these slots.
    for _ in range(rank):
        yield from each(1, Kind.F)
        yield from each(0, Kind.F)
    for _ in range(pp - rank):
        yield from each(1, Kind.F, *backward)
    while done[Kind.F, 1] < num_microbatches:
        if done[Kind.F, 0] < num_microbatches:
            yield from each(0, Kind.F)
        yield from each(0, *backward)
        yield from each(1, Kind.F, *backward)
    # Ranks before this one wait for the gradients of chunk 0; their own weight gradients can wait longer.
    for _ in range(rank):
        yield from each(0, Kind.I)
        yield from each(1, Kind.I)
    for _ in range(pp - rank):
        yield from each(0, *backward)
    for chunk in (1, 0):
        while done[Kind.W, chunk] < num_microbatches:
            yield from each(chunk, Kind.W)
