"""The parts of the training loop, and a watcher that follows them."""

from enum import StrEnum

from triaxis.engine.pipeline.lowering import Instruction


class StepPart(StrEnum):
    """A part of a training step, or of the time between steps; the value is its name in records, traces and reports."""

    DATA = "data"
    FORWARD_BACKWARD = "forward_backward"
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"
    VALIDATION = "validation"
    """Belongs to no step."""
    OTHER = "other"
    """Everything else: the loop has set no other part."""


FIRST = StepPart.DATA
"""The part with which a step begins."""


class StepWatcher:
    """A watcher of a rank's steps; every method does nothing unless a subclass overrides it."""

    def begin(self, steps_made: int) -> None:
        """Called when the run starts or continues after a rollback, with `steps_made` steps made."""

    def enter(self, part: StepPart) -> None:
        """Called when the loop enters `part`."""

    def instruction(self, instruction: Instruction | None) -> None:
        """Called before each executor instruction, and with None after the last."""

    def close(self) -> None:
        """Called when the run is over, perhaps because of an error; finish whatever is open."""
