"""Records the step result's extra numbers: losses further ahead, fp16 loss scales, skipped outliers."""

from triaxis.engine.errors import counted
from triaxis.engine.step_result import StepResult
from triaxis.engine.telemetry.meters.step_meter import StepMeter
from triaxis.engine.telemetry.record.metrics import Measured


class LossesAhead(StepMeter):
    """Meter for `losses_ahead`, the multi-token prediction losses in nats per token, nearest token first."""

    def read(self, step: int, result: StepResult) -> Measured | None:
        """Read the multi-token prediction losses. None if the model predicts only the next token."""
        if not result.ahead:
            return None
        charts = {f"learning/loss_ahead_{distance}": loss for distance, loss in enumerate(result.ahead, start=1)}
        each = " ".join(f"{loss:.4f}" for loss in result.ahead)
        return Measured(
            {"losses_ahead": result.ahead}, charts, f"loss{'es' * (len(charts) > 1)} of tokens ahead {each}"
        )


class LossScales(StepMeter):
    """Meter for fp16's `loss_scale` and `num_overflows`, the steps that overflowed in this attempt so far."""

    def __init__(self) -> None:
        self._num_overflows = 0

    def read(self, step: int, result: StepResult) -> Measured | None:
        """Read the loss scale and the number of steps that overflowed so far. None in dtypes other than fp16."""
        if result.loss_scale is None:
            return None
        self._num_overflows += result.skip == "overflowed"
        fields = {"loss_scale": result.loss_scale, "num_overflows": self._num_overflows}
        line = f"loss scale {result.loss_scale:.10g}, {counted(self._num_overflows, 'overflow')}"
        charts = {"learning/loss_scale": result.loss_scale, "health/num_overflows": self._num_overflows}
        return Measured(fields, charts, line)


class Outliers(StepMeter):
    """Meter for `num_outliers`, the updates in this attempt that `resilience.skip_above_deviations` has skipped."""

    def __init__(self) -> None:
        self._num_outliers = 0

    def read(self, step: int, result: StepResult) -> Measured | None:
        """Read the number of updates skipped as outliers so far. None as long as it is 0."""
        self._num_outliers += result.skip == "outlier"
        if not self._num_outliers:
            return None
        fields = {"num_outliers": self._num_outliers}
        return Measured(
            fields,
            {"health/num_outliers": self._num_outliers},
            f"{counted(self._num_outliers, 'outlier update')} skipped",
        )
