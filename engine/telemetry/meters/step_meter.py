"""The interface of a meter, which measures every step.

    begin            the run starts or returns to a checkpoint: posted numbers that were not read are dropped
    before_step      the forward is about to begin
    before_update    gradients are complete, weights still those that produced them
    after_update     the update is posted
    read             the step's numbers are on the host, perhaps a step later   ->   fields, charts, line

Before `read`, a meter must not copy numbers to the host: that would wait for the device. It posts a `HostCopy` instead.
"""

from triaxis.engine.step import Engine
from triaxis.engine.step_result import StepResult
from triaxis.engine.telemetry.record.metrics import Measured


class StepMeter:
    """Base class for a run's meters. Every rank has the meter and makes the same calls; methods left out do nothing."""

    @classmethod
    def of(cls, engine: Engine) -> "StepMeter | None":
        """Build the meter; None if the run's configuration does not need it."""
        return cls()

    def begin(self, steps_made: int) -> None:
        """Begin after `steps_made` steps."""

    def before_step(self) -> None:
        """Prepare for the step that is about to begin."""

    def before_update(self) -> None:
        """Measure what the update is about to change."""

    def after_update(self) -> None:
        """Measure what the update has changed."""

    def read(self, step: int, result: StepResult) -> Measured | None:
        """Read the measurement in step `step` (from 0), or None; each step is read once, in order."""
        raise NotImplementedError
