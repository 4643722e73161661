"""The parts of the training loop, and what follows them."""

from enum import StrEnum

from triaxis.engine.pipeline.lowering import Instruction


class StepPart(StrEnum):
    """A part of a training step, or of the time between steps; the value is its name in records, traces and reports."""

    DATA = "data"
    FORWARD_BACKWARD = "forward_backward"
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"
    VALIDATION = "validation"
    """Time that belongs to no step."""
    OTHER = "other"
    """The rest, for which the loop has set no other part."""


FIRST = StepPart.DATA
"""The first part of a step."""


class StepWatcher:
    """A follower of a rank's steps; each of its methods does nothing unless a watcher says otherwise."""

    def begin(self, steps_made: int) -> None:
        """Follow the run from where it has made `steps_made` steps: at its start, and after a rollback."""

    def enter(self, part: StepPart) -> None:
        """Follow the loop to its next part."""

    def instruction(self, instruction: Instruction | None) -> None:
        """Follow the executor to its next instruction; None: it has run the last."""

    def close(self) -> None:
        """End what is open; the run is over, perhaps by an error."""
