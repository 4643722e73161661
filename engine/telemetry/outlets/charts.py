"""Names and computes the charts in wandb and TensorBoard, in four groups.

learning/loss  learning/val_loss  learning/lr  learning/grad_norm ...
speed/tokens_per_second  speed/step_seconds  speed/tflops_per_gpu  speed/mfu  speed/share_bubble ...
memory/peak_gib
health/cp_imbalance  health/experts/dropped ...  each meter (`triaxis.engine.telemetry.meters`) names its own charts

A chart that could only be flat is left out, such as shares for axes with size 1. metrics.jsonl has every number.
`telemetry.names: megatron` gives charts the names that Megatron-LM logs (`megatron/training/training.py`, `training_log`), so that
panels made for Megatron-LM runs keep working.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from triaxis.engine.config.tree import Config
from triaxis.engine.telemetry.record.metrics import StepMetrics

X_AXES = ("step", "consumed_tokens", "consumed_samples", "attempt")
"""Numbers that serve as x axes or separate attempts. They have no charts, which would be straight lines."""

_NAMES = {
    "learning/loss": "loss",
    "learning/val_loss": "val_loss",
    "learning/lr": "lr",
    "learning/grad_norm": "grad_norm",
    "speed/tokens_per_second": "tokens_per_second",
    "speed/step_seconds": "step_time_seconds",
    "speed/tflops_per_gpu": "model_tflops_per_device",
    "speed/tflops_per_gpu_with_recompute": "hardware_tflops_per_device",
    "speed/mfu": "mfu",
    "speed/hfu": "hfu",
    "health/cp_imbalance": "cp_imbalance",
}
"""Charts and their `StepMetrics` fields; a field that is None adds no point."""

_AXES_OF_PART = {
    "exposed_tp": ("tp",),
    "exposed_cp": ("cp",),
    "exposed_ep": ("ep",),
    "host_read": ("ep",),
    "bubble": ("pp",),
    "exposed_pp": ("pp",),
    "exposed_dp": ("dp", "cp"),
}
"""Parts of a step's time and their axes: a part is always zero if all its axes have size 1."""

MEGATRON_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "learning/loss": "lm loss",
        "learning/val_loss": "lm loss validation",
        "learning/lr": "learning-rate",
        "learning/grad_norm": "grad-norm",
        "learning/loss_scale": "loss-scale",
        "learning/loss_ahead_1": "mtp_1 loss",
        "speed/step_seconds": "iteration-time",
        "speed/tflops_per_gpu": "throughput",
    }
)


class Charts:
    """Names one run's charts and computes a step's points.

    Args:
        names: Megatron-LM's chart names, by our names; an empty mapping keeps our names.
        flat_parts: parts of a step's time that are zero in this layout.
        tokens_per_step: number of tokens in a step, masked ones included.
    """

    def __init__(self, names: Mapping[str, str], flat_parts: frozenset[str], tokens_per_step: int) -> None:
        self._names, self._flat_parts, self._tokens_per_step = names, flat_parts, tokens_per_step

    @classmethod
    def of_run(cls, config: Config, layout: Mapping[str, Any]) -> Self:
        """Choose the charts for a run.

        Args:
            layout: size of each parallel axis, by name; a missing axis counts as larger than 1.
        """
        flat = [part for part, axes in _AXES_OF_PART.items() if all(layout.get(axis) == 1 for axis in axes)]
        names = MEGATRON_NAMES if config.telemetry.names == "megatron" else {}
        return cls(names, frozenset(flat), config.train.global_batch_size * config.model.seq_length)

    def name(self, ours: str) -> str:
        """Look up the name that wandb and TensorBoard show for our chart `ours`."""
        return self._names.get(ours, ours)

    def of(self, metrics: StepMetrics) -> dict[str, float]:
        """Compute a step's value in each chart, by logged name. Charts without a value are left out."""
        values: dict[str, float | None] = {name: getattr(metrics, field) for name, field in _NAMES.items()}
        if metrics.loss_tokens != self._tokens_per_step:
            values["learning/counted_tokens"] = metrics.loss_tokens
        if metrics.time_split is not None:
            shares = metrics.time_split.shares.items()
            values |= {
                f"speed/share_{part.removeprefix('exposed_')}": share
                for part, share in shares
                if part not in self._flat_parts
            }
        for measured in metrics.measured:
            values |= measured.charts
        values["memory/peak_gib"] = metrics.peak_memory_bytes / 2**30
        return {self.name(name): value for name, value in values.items() if value is not None}
