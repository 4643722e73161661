"""The names by which wandb and TensorBoard group their charts.

train/step  train/loss  train/val_loss  train/consumed_tokens ...
perf/tokens_per_second  perf/mfu  perf/step_time_seconds  perf/data_seconds ...
time/compute_seconds  time/bubble_seconds  time/schedule_bubble_seconds ...     on steps with a line
pipeline/bubble_fraction  pipeline/schedule_bubble_fraction  comm/exposed_tp_fraction ...     of the step, 0 to 1
optim/lr  optim/grad_norm
data/loss_tokens
memory/peak_gib
train/loss_ahead_1  optim/loss_scale  experts/dropped ...     each meter names its own (`triaxis.engine.telemetry.meters`)
"""

from triaxis.engine.telemetry.record.metrics import StepMetrics

_TRAIN = ("step", "attempt", "consumed_samples", "consumed_tokens", "loss", "val_loss")
_OPTIM = ("lr", "grad_norm")
_PERF = (
    "step_time_seconds",
    "tokens_per_second",
    "model_tflops_per_device",
    "hardware_tflops_per_device",
    "mfu",
    "hfu",
)
_FRACTIONS = (
    ("pipeline", "bubble"),
    ("pipeline", "schedule_bubble"),
    ("comm", "exposed_tp"),
    ("comm", "exposed_cp"),
    ("comm", "exposed_ep"),
    ("comm", "exposed_pp"),
    ("comm", "exposed_dp"),
)
"""Parts of a step's time that are also shown as a fraction of it, 0 to 1."""


def sections(metrics: StepMetrics) -> dict[str, float]:
    """Return the numbers of the step by section; what is not known (no peak, no validation) is left out."""
    values: dict[str, float | None] = {f"train/{name}": getattr(metrics, name) for name in _TRAIN}
    values |= {f"perf/{name}": getattr(metrics, name) for name in _PERF}
    values |= {f"optim/{name}": getattr(metrics, name) for name in _OPTIM}
    values["data/loss_tokens"] = metrics.loss_tokens
    values |= {f"perf/{phase}_seconds": seconds for phase, seconds in metrics.spans_seconds.items()}
    if metrics.time_split is not None:
        split = metrics.time_split.to_record()
        values |= {f"time/{name}": value for name, value in split.items() if name.endswith("_seconds")}
        for section, part in _FRACTIONS:
            values[f"{section}/{part}_fraction"] = split[f"{part}_seconds"] / split["step_seconds"]
    values["perf/cp_imbalance"] = metrics.cp_imbalance
    for measured in metrics.measured:
        values |= measured.charts
    values["memory/peak_gib"] = metrics.peak_memory_bytes / 2**30
    return {name: value for name, value in values.items() if value is not None}
