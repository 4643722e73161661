"""What is known about a step, as one typed record, and how its speeds are worked out.

    losses and norms (agreed by all ranks)  +  spans of host time  +  FLOPs per token   ->   StepMetrics   ->   every sink

Losses are in nats per token. Speeds are those of the whole job, `_per_device` those of one rank. Time spent in validation
is no part of a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from triaxis.engine.config.plan import BatchPlan
from triaxis.engine.config.tree import Config
from triaxis.engine.data.document_statistics import DocumentStatistics
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.telemetry.record.flops import PeakRate, hardware_flops_per_token, known_peak, model_flops_per_token
from triaxis.engine.telemetry.timing.time_split import TimeSplit

OPTIONAL = ("cp_imbalance", "val_loss", "time_split", "measured")
"""Fields that are left out of a record where they are None; in place of `measured` stand the fields of each `Measured`."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The numbers that one meter (`triaxis.engine.telemetry.meters`) has read in a step.

    Attributes:
        fields: JSON values, by their names in the step's record.
        charts: by the names of wandb and TensorBoard.
        line: printed under the step's line; "": none.
    """

    fields: Mapping[str, Any]
    charts: Mapping[str, float] = field(default_factory=dict)
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step.

    Attributes:
        step: counts from 1: how many steps have been made when this one is done.
        attempt: how often this run had been started before.
        unix_time_seconds: when the step ended.
        consumed_samples, consumed_tokens: since the beginning of the run, this step included, masked tokens too.
        loss: nats per unmasked token of the global batch, before the update.
        loss_tokens: unmasked tokens of the global batch, or the sum of their weights.
        lr: with which the weights were updated.
        grad_norm: global, before clipping.
        step_time_seconds: from the end of the last step to the end of this one, without validation.
        spans_seconds: the same time by part; they add up to it.
        tokens_per_second: of the whole job, masked tokens included.
        model_tflops_per_device: model FLOPs, causal, logical vocabulary (`triaxis.engine.telemetry.record.flops`).
        hardware_tflops_per_device: with recomputed forwards and the padded vocabulary.
        mfu, hfu: those two over the device's peak, 0 to 1; None where no peak is known.
        peak_memory_bytes: of the logging rank, since the start: allocated by torch on a GPU, resident on a CPU.
        cp_imbalance: of attention work over the context-parallel ranks of the logging rank's replica, the fullest over the mean
            (`triaxis.engine.context_parallel.imbalance`); None where rows are not cut or are one document each.
        val_loss: nats per token of the validation that followed this step; None where none did.
        time_split: where the time of the steps before this one went, on all ranks
            (`triaxis.engine.telemetry.timing.step_times`); None but on steps with a line.
        measured: by the meters of the run, in their order.
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
        """Return a JSON object, without the fields that most runs lack (`OPTIONAL`) where they are None."""
        record = asdict(replace(self, time_split=None, measured=()))
        record["time_split"] = None if self.time_split is None else self.time_split.to_record()
        record = {name: value for name, value in record.items() if name not in OPTIONAL or value not in (None, ())}
        for each in self.measured:
            record |= each.fields
        return record


class Meter:
    """The calculator of `StepMetrics` from a step's result and its duration.

    Args:
        config: sizes, recompute, dtype, and `telemetry.peak_tflops`, which counts before the table of devices.
        layers_per_chunk: transformer layers of each of the pp x vpp chunks.
        world_size: devices that share the work.
        device_name: torch's; "cpu" has no peak.
        documents: within which tokens attend; None: across them.
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
        """Make the record of a step that has ended; `step` counts from 1."""
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
