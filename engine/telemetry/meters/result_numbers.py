"""Numbers of a step that its result has already: losses of tokens ahead, the loss scale, updates that were left out."""

from triaxis.engine.errors import counted
from triaxis.engine.step_result import StepResult
from triaxis.engine.telemetry.meters.step_meter import StepMeter
from triaxis.engine.telemetry.record.metrics import Measured


class LossesAhead(StepMeter):
    """`losses_ahead`: nats per token of multi-token prediction, at each distance beyond the next token."""

    def read(self, step: int, result: StepResult) -> Measured | None:
        """Return the losses; None where the model predicts the next token alone."""
        if not result.ahead:
            return None
        charts = {f"learning/loss_ahead_{distance}": loss for distance, loss in enumerate(result.ahead, start=1)}
        each = " ".join(f"{loss:.4f}" for loss in result.ahead)
        return Measured(
            {"losses_ahead": result.ahead}, charts, f"loss{'es' * (len(charts) > 1)} of tokens ahead {each}"
        )


class LossScales(StepMeter):
    """`loss_scale` of the backward of an fp16 run, `num_overflows`: steps of the attempt so far that it made overflow."""

    def __init__(self) -> None:
        self._num_overflows = 0

    def read(self, step: int, result: StepResult) -> Measured | None:
        """Return the scale and the count; None in other dtypes than fp16."""
        if result.loss_scale is None:
            return None
        self._num_overflows += result.skip == "overflowed"
        fields = {"loss_scale": result.loss_scale, "num_overflows": self._num_overflows}
        line = f"loss scale {result.loss_scale:.10g}, {counted(self._num_overflows, 'overflow')}"
        charts = {"learning/loss_scale": result.loss_scale, "health/num_overflows": self._num_overflows}
        return Measured(fields, charts, line)


class Outliers(StepMeter):
    """`num_outliers`: steps of the attempt so far whose update was left out by `resilience.skip_above_deviations`."""

    def __init__(self) -> None:
        self._num_outliers = 0

    def read(self, step: int, result: StepResult) -> Measured | None:
        """Return the count; None where there was none."""
        self._num_outliers += result.skip == "outlier"
        if not self._num_outliers:
            return None
        fields = {"num_outliers": self._num_outliers}
        were = "update was" if self._num_outliers == 1 else "updates were"
        return Measured(
            fields,
            {"health/num_outliers": self._num_outliers},
            f"{counted(self._num_outliers, 'outlier')}, whose {were} left out",
        )
