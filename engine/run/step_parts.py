"""Names the training loop's activities, and defines a base class for observing them."""

from enum import StrEnum

from triaxis.engine.pipeline.lowering import Instruction


class StepPart(StrEnum):
    """An activity of the training loop, in a step or between steps. Each moment belongs to exactly one."""

    DATA = "data"
    FORWARD_BACKWARD = "forward_backward"
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"
    VALIDATION = "validation"
    """Between two steps; its time belongs to no step."""
    OTHER = "other"
    """Everything else: all time for which the loop has entered no other part."""


FIRST = StepPart.DATA
"""The part with which each step begins."""


class StepWatcher:
    """A watcher of a rank's steps. A subclass overrides the methods that it needs; the others do nothing."""

    def begin(self, steps_made: int) -> None:
        """Called when the run starts, or continues after a rollback, with the number of completed steps."""

    def enter(self, part: StepPart) -> None:
        """Called when the loop ends its running part and enters `part`. `FIRST` begins a step."""

    def instruction(self, instruction: Instruction | None) -> None:
        """Called before the executor runs each instruction, and with None after the last one."""

    def close(self) -> None:
        """Called when the run is over, perhaps because of an error. Finish whatever is open."""
