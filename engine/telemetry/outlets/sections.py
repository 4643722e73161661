"""The names by which wandb and TensorBoard group their charts (no torch here).

train/step  train/loss  train/val_loss  train/consumed_tokens ...  train/loss_ahead_1     of multi-token prediction
perf/tokens_per_second  perf/mfu  perf/step_time_seconds  perf/data_seconds ...
time/compute_seconds  time/bubble_seconds  time/schedule_bubble_seconds ...     on steps with a line
pipeline/bubble_fraction  pipeline/schedule_bubble_fraction  comm/exposed_tp_fraction ...     of the step, 0 to 1
optim/lr  optim/grad_norm  optim/loss_scale  optim/num_overflows     the last two of fp16 runs
optim/num_outliers     where an update was left out
data/loss_tokens
experts/load_max_over_mean  experts/dropped     the worst layer's;  experts/layer_7/load_max_over_mean  experts/layer_7/entropy
norms/embedding.*/grad  ../weight  ../update  ../relative_update     by groups, with telemetry.norms_interval
fp8/gradient_underflow  fp8/gradient_overflow ...     the worst layer's;  fp8/layers.0.mlp.down/gradient_underflow ...
memory/peak_gib
"""

from triaxis.engine.kernels.fp8.shares import LostByLinear
from triaxis.engine.telemetry.record.metrics import StepMetrics

_TRAIN = ("step", "attempt", "consumed_samples", "consumed_tokens", "loss", "val_loss")
_OPTIM = ("lr", "grad_norm", "loss_scale", "num_overflows", "num_outliers")
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
    values |= {f"train/loss_ahead_{distance}": loss for distance, loss in enumerate(metrics.losses_ahead, start=1)}
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
    if (experts := metrics.experts) is not None:
        values["experts/load_max_over_mean"], values["experts/dropped"] = experts.worst[0], experts.dropped
        for layer, ratio, entropy in zip(experts.layers, experts.load_max_over_mean, experts.entropy, strict=True):
            values[f"experts/layer_{layer}/load_max_over_mean"] = ratio
            values[f"experts/layer_{layer}/entropy"] = entropy
    for group, norms in (metrics.norms or {}).items():
        values |= {
            f"norms/{group}/{name}": getattr(norms, name) for name in ("grad", "weight", "update", "relative_update")
        }
    values |= _fp8(metrics.fp8 or {})
    values["memory/peak_gib"] = metrics.peak_memory_bytes / 2**30
    return {name: value for name, value in values.items() if value is not None}


def _fp8(lost: LostByLinear) -> dict[str, float]:
    """Return the shares that FP8 loses, by linear layer and operand, and for each operand those of the worst layer."""
    values: dict[str, float] = {}
    for linear, operands in lost.items():
        for operand, of_it in operands.items():
            for name, share in ((f"{operand}_underflow", of_it.underflow), (f"{operand}_overflow", of_it.overflow)):
                values[f"fp8/{linear}/{name}"] = share
                values[f"fp8/{name}"] = max(share, values.get(f"fp8/{name}", 0.0))
    return values
