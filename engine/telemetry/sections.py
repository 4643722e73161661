"""The names by which wandb and TensorBoard group their charts (no torch here).

train/step  train/loss  train/val_loss  train/lr  train/grad_norm ...
perf/tokens_per_second  perf/mfu  perf/step_time_seconds  perf/data_seconds ...
memory/peak_gib
"""

from engine.telemetry.metrics import StepMetrics

_TRAIN = ("step", "attempt", "consumed_samples", "consumed_tokens", "loss", "val_loss", "lr", "grad_norm")
_PERF = (
    "step_time_seconds",
    "tokens_per_second",
    "model_tflops_per_device",
    "hardware_tflops_per_device",
    "mfu",
    "hfu",
)


def sections(metrics: StepMetrics) -> dict[str, float]:
    """What is known about the step, by section; what is not known (no peak, no validation) is left out."""
    values: dict[str, float | None] = {f"train/{name}": getattr(metrics, name) for name in _TRAIN}
    values |= {f"perf/{name}": getattr(metrics, name) for name in _PERF}
    values |= {f"perf/{phase}_seconds": seconds for phase, seconds in metrics.spans_seconds.items()}
    values["memory/peak_gib"] = metrics.peak_memory_bytes / 2**30
    return {name: value for name, value in values.items() if value is not None}
