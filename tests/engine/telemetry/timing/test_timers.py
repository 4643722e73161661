"""Spans leave no gap: they add up to the time between two ends of steps, whatever was called in between."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.telemetry.timing.timers import Timers


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@given(
    st.lists(
        st.tuples(st.sampled_from([StepPart.DATA, StepPart.FORWARD_BACKWARD, "validation", None]), st.floats(0, 10)),
        max_size=30,
    )
)
def test_the_spans_of_all_steps_add_up_to_the_time_that_went_by(
    calls: list[tuple[str | None, float]],
) -> None:
    clock = Clock()
    timers = Timers(clock)
    total = 0.0
    for name, seconds in calls:
        if name is None:
            total += sum(timers.end_step().values())
        else:
            timers.enter(name)
        clock.seconds += seconds
    total += sum(timers.end_step().values())
    assert total == pytest.approx(clock.seconds - 100.0)


def test_each_part_gets_its_time_and_a_step_starts_from_nothing() -> None:
    clock = Clock()
    timers = Timers(clock)
    for part, seconds in [(StepPart.DATA, 1.0), (StepPart.FORWARD_BACKWARD, 4.0), (StepPart.DATA, 2.0)]:
        timers.enter(part)
        clock.seconds += seconds
    assert timers.end_step() == {StepPart.OTHER: 0.0, StepPart.DATA: 3.0, StepPart.FORWARD_BACKWARD: 4.0}
    clock.seconds += 0.25
    timers.enter(StepPart.FORWARD_BACKWARD)
    clock.seconds += 0.5
    assert timers.running_seconds() == 0.5
    assert timers.end_step() == {StepPart.OTHER: 0.25, StepPart.FORWARD_BACKWARD: 0.5}
