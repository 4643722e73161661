"""Say how learning rates in another engine differ from ours."""

from collections.abc import Callable, Iterable

MOST_COMPARED = 1_000
"""Number of evenly spaced steps at which rates are compared, besides those beside the ends of a schedule's parts."""


def differing_rates(
    there: Callable[[int], float],
    here: Callable[[int], float],
    ends: Iterable[int],
    num_steps: int,
    lr: float,
    engine: str,
) -> list[str]:
    """Compare two schedules, and describe their difference in one note.

    The note has the first step's rates and the largest difference. Equal schedules get no note.

    Args:
        there, here: the other engine's rate and ours, of the step that starts after a number of steps.
        ends: steps at which parts of a schedule end; the steps beside them are compared too.
        num_steps: steps of the run. A long run is compared only at `MOST_COMPARED` of them and beside `ends`.
        lr: peak rate; differences below a 10^12th of it are rounding.
        engine: the other engine's name.
    """
    compared = {end + beside for end in ends for beside in range(-2, 3)}
    compared |= {*range(0, num_steps, 1 + num_steps // MOST_COMPARED)}
    rates = {step: (there(step), here(step)) for step in sorted(compared) if 0 <= step < num_steps}
    tolerance = 1e-12 * abs(lr)
    gaps = {step: gap for step, (one, other) in rates.items() if (gap := abs(one - other)) > tolerance}
    if not gaps:
        return []
    largest = next(step for step, gap in gaps.items() if gap >= max(gaps.values()) - tolerance)
    equal = next((step for step in rates if step > max(gaps)), None)
    first = rates[min(rates)]
    return [
        f"the learning rate of step 1 is {first[0]:g} in {engine} and {first[1]:g} here; of {num_steps:,} steps, step "
        f"{largest + 1:,} differs most, by {gaps[largest]:g}: {rates[largest][0]:g} there, {rates[largest][1]:g} here"
        + (f"; the rates are equal from step {equal + 1:,} on" if equal is not None else "")
    ]
