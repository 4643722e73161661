"""Defines the flags that each rank's host sets to 1.0 or 0.0, and that a step's one small all-reduce sums.

The all-reduced vector begins with numbers from the device: squared gradient norm, loss sum, and rows that did not fit into the
experts' buffers. Then come these flags, then a loss sum for each token ahead (multi-token prediction).
`triaxis.engine.step.Engine.update` builds the vector and names its numbers.

The number of counted labels is not in the vector. It is summed before the step (`triaxis.engine.step.Engine.post_labels`), because
the backward divides by them.
"""

from collections.abc import Sequence
from typing import NamedTuple

NUM_SUMS = 3


class SaveFlags(NamedTuple):
    """Flags about the checkpoint save in progress: each is 0 or 1 on one rank, and after the all-reduce a number of ranks."""

    written: float = 0.0
    not_written: float = 0.0
    committed: float = 0.0
    not_committed: float = 0.0


class StopFlags(NamedTuple):
    """Requests to stop (`engine/comm/stop.py`): each is 0 or 1 on one rank, and after the all-reduce a number of ranks."""

    preempted: float = 0.0
    interrupted: float = 0.0


class StepFlags(NamedTuple):
    """All flags of a step: each is 0 or 1 on one rank, and after the all-reduce a number of ranks.

    Attributes:
        retried: whether the rank's allocator has had to free memory and try again since the previous step.
    """

    save: SaveFlags = SaveFlags()
    stop: StopFlags = StopFlags()
    retried: float = 0.0

    def values(self) -> tuple[float, ...]:
        """List the flags in the vector's order."""
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
