"""The phases of the training loop (no torch here)."""

from enum import StrEnum


class Phase(StrEnum):
    """A part of a training step, or what lies between steps; the value is the name in records, traces and reports."""

    DATA = "data"
    FORWARD_BACKWARD = "forward_backward"
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"
    VALIDATION = "validation"
    """Its time belongs to no step."""
    OTHER = "other"
    """The rest: the loop has named no other phase."""


FIRST = Phase.DATA
"""The phase with which a step begins."""
