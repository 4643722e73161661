"""Schedules whose weight gradients fill the bubble (no torch here).

rank 0 of 3, 1F1B     F0 F1 F2 ........ B0    F3 B1    ...       B = I and W
             ZB-H1    F0 F1 F2 ...... I0 W0   F3 I1 W1 ...       ranks 1 and 2 ran their I0 before any W
"""

from dataclasses import replace

from engine.pipeline.actions import Action, Kind, Schedule


def zb_h1(schedule: Schedule) -> Schedule:
    """Turn 1F1B into ZB-H1 (2401.10241, section 3 and figure 2): each backward in two, its weight gradients later.

    A rank hands on the gradient of its input before it computes those of its weights, so the rank before it starts earlier, and
    weight gradients fill the end of the step. Rank r holds those of at most r microbatches back: in flight and held together are
    at most p, as on the first rank of 1F1B. Bubble: (p - 1)(T_F + T_B - T_W), T_B of the input gradient alone.
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
