"""Defines the flags that a step's small all-reduce sums over all ranks.

Each rank sets a flag to 1.0 or 0.0, so the sum is a number of ranks. The all-reduced vector begins with three sums from the device:
squared gradient norm, loss, token rows without room in experts' buffers. The flags follow, and after them a loss sum for each token
ahead (multi-token prediction).

The number of counted labels is not in the vector. `Engine.post_labels` sums it before the step, because the backward divides by it.
"""

from collections.abc import Sequence
from typing import NamedTuple

NUM_SUMS = 3


class SaveFlags(NamedTuple):
    """Whether a rank's file for the save in progress is written or has failed; on rank 0, the same for the commit."""

    written: float = 0.0
    not_written: float = 0.0
    committed: float = 0.0
    not_committed: float = 0.0


class StopFlags(NamedTuple):
    """Requests to stop the run, one flag per reason (`engine/comm/stop.py`)."""

    preempted: float = 0.0
    interrupted: float = 0.0


class StepFlags(NamedTuple):
    """All flags of a step.

    On one rank a flag is 0 or 1, and after the all-reduce a number of ranks.

    Attributes:
        retried: whether the rank's allocator has had to free memory and try again since the previous step.
    """

    save: SaveFlags = SaveFlags()
    stop: StopFlags = StopFlags()
    retried: float = 0.0

    def values(self) -> tuple[float, ...]:
        """List the flags in their order in the step's all-reduced vector."""
        return (*self.save, *self.stop, self.retried)

    @classmethod
    def of(cls, values: Sequence[float]) -> "StepFlags":
        """Build the flags from numbers in the order of `values()`."""
        num_save, num_stop = len(SaveFlags._fields), len(StopFlags._fields)
        assert len(values) == num_save + num_stop + 1, f"{len(values)} flags: the traffic of a step is a constant"
        return cls(SaveFlags(*values[:num_save]), StopFlags(*values[num_save:-1]), values[-1])


NO_FLAGS = StepFlags()

NUM_FLAGS = len(NO_FLAGS.values())

NUM_NUMBERS = NUM_SUMS + NUM_FLAGS
"""Length of the vector."""
