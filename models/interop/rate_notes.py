"""Say how learning rates in another engine differ from ours."""

from collections.abc import Mapping


def differing_rates(rates: Mapping[int, tuple[float, float]], num_steps: int, lr: float, engine: str) -> list[str]:
    """Compare two schedules, and describe their difference in one note.

    The note has the first step's rates and the largest difference. Equal schedules get no note.

    Args:
        rates: steps done before -> (the other engine's rate, our rate), in order.
        num_steps: steps of the run, for the note.
        lr: peak rate; differences below a 10^12th of it are rounding.
        engine: the other engine's name.
    """
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
