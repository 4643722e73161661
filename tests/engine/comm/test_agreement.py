"""The layout of the step's agreement: what is written is what is read, each number at one place."""

import pytest

from triaxis.engine.comm.agreement import NUM_NUMBERS, NUM_SUMS, SaveFlags, StepFlags, StopFlags


def test_each_flag_has_a_place_of_its_own() -> None:
    flags = StepFlags(SaveFlags(1.0, 2.0, 3.0, 4.0), StopFlags(5.0, 6.0), 7.0)
    assert flags.values() == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    assert StepFlags.of(flags.values()) == flags
    assert NUM_NUMBERS == NUM_SUMS + 7
    assert StepFlags.of([0.0] * 7) == StepFlags(), "a rank that raises nothing"


def test_a_vector_of_another_length_is_refused() -> None:
    with pytest.raises(AssertionError, match="6 flags"):
        StepFlags.of([0.0] * 6)
