"""Defines the record of one step and computes its speeds.

    losses and norms (equal on all ranks)  +  host time by part  +  FLOPs per token   ->   StepMetrics   ->   every sink

Losses are in nats per token. Speeds cover the whole job, but `_per_device` speeds cover one rank. A step's time excludes
validation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from triaxis.engine.config.quantities.plan import BatchPlan
from triaxis.engine.config.tree import Config
from triaxis.engine.data.document_statistics import DocumentStatistics
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.telemetry.record.flops import hardware_flops_per_token, model_flops_per_token
from triaxis.engine.telemetry.record.peaks import PeakRate, known_peak
from triaxis.engine.telemetry.timing.time_split import TimeSplit

OPTIONAL = ("cp_imbalance", "val_loss", "time_split", "measured")
"""Fields left out of a record when they are None. In a record, the `fields` of each `Measured` replace `measured`."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Extra numbers that one meter measured in a step, such as expert load.

    Attributes:
        fields: JSON values, by name in the step's record.
        charts: values, by chart name in wandb and TensorBoard.
        line: text printed under the step's line; "" prints nothing.
    """

    fields: Mapping[str, Any]
    charts: Mapping[str, float] = field(default_factory=dict)
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one optimizer step.

    Attributes:
        step: number of completed steps, this one included.
        attempt: number of times the run had been started before this attempt.
        unix_time_seconds: time at which the step ended.
        consumed_samples, consumed_tokens: totals since the run began, this step and masked tokens included.
        loss: nats per unmasked token in the global batch.
        loss_tokens: unmasked tokens in the global batch, or the sum of their weights.
        lr: learning rate of this step's update.
        grad_norm: global gradient norm, before clipping.
        step_time_seconds: time since the previous step's end, without validation.
        spans_seconds: seconds by part of the training loop; they add up to `step_time_seconds`.
        tokens_per_second: whole-job throughput, masked tokens included.
        model_tflops_per_device: TFLOP/s with causal attention and logical vocabulary (`triaxis.engine.telemetry.record.flops`).
        hardware_tflops_per_device: TFLOP/s that also count recomputed forwards and the padded vocabulary.
        mfu, hfu: model and hardware TFLOP/s divided by the device's peak, 0 to 1; None if no peak is known.
        peak_memory_bytes: the logging rank's peak since its start, allocated by torch on a GPU, resident on a CPU.
        cp_imbalance: largest divided by mean attention work of the logging replica's context-parallel ranks
            (`triaxis.engine.context_parallel.imbalance`); None without context parallelism, or if each row holds one document.
        val_loss: loss in the validation after this step, nats per token; None if there was none.
        time_split: parts of earlier steps' time, over all ranks (`triaxis.engine.telemetry.timing.step_times`); None unless this
            step has a printed line.
        measured: the meters' measurements, in the order of the meters.
    """

    step: int
    attempt: int
    unix_time_seconds: float
    consumed_samples: int
    consumed_tokens: int
    loss: float
    loss_tokens: float
    lr: float
    grad_norm: float
    step_time_seconds: float
    spans_seconds: Mapping[str, float]
    tokens_per_second: float
    model_tflops_per_device: float
    hardware_tflops_per_device: float
    mfu: float | None
    hfu: float | None
    peak_memory_bytes: int
    cp_imbalance: float | None = None
    val_loss: float | None = None
    time_split: TimeSplit | None = None
    measured: Sequence[Measured] = ()

    def to_record(self) -> dict[str, Any]:
        """Convert to a JSON object, without `OPTIONAL` fields that are None."""
        record = asdict(replace(self, time_split=None, measured=()))
        record["time_split"] = None if self.time_split is None else self.time_split.to_record()
        record = {name: value for name, value in record.items() if name not in OPTIONAL or value not in (None, ())}
        for each in self.measured:
            record |= each.fields
        return record


class Meter:
    """Calculator that turns a step's result and duration into `StepMetrics`.

    Args:
        config: run configuration, whose `recompute` is resolved; its `telemetry.peak_tflops` overrides the table of device peaks.
        layers_per_chunk: number of transformer layers in each of the pp x vpp chunks.
        world_size: number of devices that share the work.
        device_name: torch's device name; "cpu" has no peak.
        documents: statistics of the documents, if attention stays within one document; None if attention crosses documents.
    """

    def __init__(
        self,
        config: Config,
        plan: BatchPlan,
        *,
        layers_per_chunk: Sequence[int],
        world_size: int,
        device_name: str,
        attempt: int,
        documents: DocumentStatistics | None = None,
    ) -> None:
        recompute = config.recompute
        self.model_flops_per_token = model_flops_per_token(config.model, documents=documents)
        self.hardware_flops_per_token = hardware_flops_per_token(config.model, recompute, layers_per_chunk, documents)
        self.peak = known_peak(device_name, config.precision.dtype, in_fp8=config.precision.fp8 is not None)
        if config.telemetry.peak_tflops is not None:
            self.peak = PeakRate(config.telemetry.peak_tflops, "telemetry.peak_tflops")
        self._plan = plan
        self._world_size = world_size
        self._attempt = attempt

    def measure(
        self,
        step: int,
        *,
        loss: float,
        loss_tokens: float,
        lr: float,
        grad_norm: float,
        spans_seconds: Mapping[StepPart, float],
        unix_time_seconds: float,
        peak_memory_bytes: int,
        cp_imbalance: float | None = None,
    ) -> StepMetrics:
        """Build the record of a completed step, counted from 1."""
        spans = {part.value: seconds for part, seconds in spans_seconds.items() if part is not StepPart.VALIDATION}
        step_time_seconds = sum(spans.values())
        tokens_per_second = self._plan.tokens_per_step / step_time_seconds
        teratokens_per_device = tokens_per_second / self._world_size / 1e12
        model_tflops = self.model_flops_per_token * teratokens_per_device
        hardware_tflops = self.hardware_flops_per_token * teratokens_per_device
        return StepMetrics(
            step=step,
            attempt=self._attempt,
            unix_time_seconds=unix_time_seconds,
            consumed_samples=self._plan.phase.samples_before(step),
            consumed_tokens=self._plan.phase.tokens_before(step),
            loss=loss,
            loss_tokens=loss_tokens,
            lr=lr,
            grad_norm=grad_norm,
            step_time_seconds=step_time_seconds,
            spans_seconds=spans,
            tokens_per_second=tokens_per_second,
            model_tflops_per_device=model_tflops,
            hardware_tflops_per_device=hardware_tflops,
            mfu=model_tflops / self.peak.tflops if self.peak else None,
            hfu=hardware_tflops / self.peak.tflops if self.peak else None,
            peak_memory_bytes=peak_memory_bytes,
            cp_imbalance=cp_imbalance,
        )
