"""Defines the interface of meters, which measure a run's steps.

    begin            the run starts or returns to a checkpoint; numbers not read yet are dropped
    before_step      the forward is about to begin
    before_update    gradients are complete; weights are still the ones that produced them
    after_update     the update is posted
    read             the step's numbers are on the host, perhaps a step later; the meter returns fields, charts and a line

Before `read`, a meter must not copy numbers to the host, because such a copy waits for the device. The meter posts a `HostCopy`
instead.
"""

from triaxis.engine.step import Engine
from triaxis.engine.step_result import StepResult
from triaxis.engine.telemetry.record.metrics import Measured


class StepMeter:
    """Base class for a run's meters.

    A meter that communicates must exist on every rank, and every rank makes the same calls. Only `read` must be overridden.
    """

    @classmethod
    def of(cls, engine: Engine) -> "StepMeter | None":
        """Build the meter. None if the run's configuration does not need it."""
        return cls()

    def begin(self, steps_made: int) -> None:
        """Start measuring with `steps_made` steps complete, also after a rollback. Drop numbers not read yet."""

    def before_step(self) -> None:
        """Called after the step's batch is read, before its first forward."""

    def before_update(self) -> None:
        """Called when gradients are complete, and weights are still the ones that produced them."""

    def after_update(self) -> None:
        """Called once the update is posted. Device work that a meter posts here reads the updated master weights."""

    def read(self, step: int, result: StepResult) -> Measured | None:
        """Return the numbers of step `step`, from 0. None adds nothing to the step's record. Every step is read once, in order."""
        raise NotImplementedError
