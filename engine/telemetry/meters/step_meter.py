"""A measurement of every step.

    begin            the run starts, or goes back to a checkpoint: what was posted and not read is dropped
    before_step      the forward is about to begin
    before_update    gradients are whole, weights still those that made them
    after_update     the update is posted
    read             the numbers of the step are on the host, perhaps a step later   ->   fields, charts, line

Until `read` a meter brings no number to the host, which would wait for the device. It posts a `HostCopy` instead.
"""

from triaxis.engine.step import Engine
from triaxis.engine.step_result import StepResult
from triaxis.engine.telemetry.record.metrics import Measured


class StepMeter:
    """A measurement of one run, on every rank; each rank makes the same calls. What a meter leaves out does nothing."""

    @classmethod
    def of(cls, engine: Engine) -> "StepMeter | None":
        """Make that of a run; None where its configuration has no use for it."""
        return cls()

    def begin(self, steps_made: int) -> None:
        """Begin after so many steps."""

    def before_step(self) -> None:
        """Prepare for the step that is about to begin."""

    def before_update(self) -> None:
        """Measure what the update is about to change."""

    def after_update(self) -> None:
        """Measure what the update has changed."""

    def read(self, step: int, result: StepResult) -> Measured | None:
        """Return what was measured in step number `step` (from 0), or None; each step is read once, in order."""
        raise NotImplementedError
