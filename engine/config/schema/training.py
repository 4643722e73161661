"""The `train`, `eval`, `optimizer` and `precision` sections."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from triaxis.engine.config.schema.ema import EmaConfig
from triaxis.engine.config.schema.fp8 import Fp8Config
from triaxis.engine.config.schema.groups import GroupFields
from triaxis.engine.config.schema.loss_scale import LossScaleConfig
from triaxis.engine.config.schema.section import LAYOUT, MEANT, OnResume, Section
from triaxis.engine.config.values.counts import Count
from triaxis.engine.config.values.optimizer_kinds import OptimizerName

MOST_STEPS = 2**40
"""Maximum optimizer steps in a run; at one step per millisecond they would take 35 years."""


DECAYS = ("cosine", "linear")
"""Schedules that decay from the end of the warm-up on; the others may have a cooldown."""

CONSTANT_RATE: Mapping[str, Any] = MappingProxyType(
    {
        "lr_schedule": "constant",
        "min_lr": 0.0,
        "warmup_steps": 0,
        "warmup_tokens": None,
        "decay_steps": None,
        "cooldown_tokens": None,
        "cooldown_shape": "linear",
    }
)
"""Values of `optimizer` fields that give a constant learning rate; they replace the schedule in runs of only a few steps."""


def _length_is_free(config: Any) -> bool:
    """Whether no step's learning rate depends on the run's length; then a longer run has the same steps, and more after them."""
    optimizer = config.optimizer
    if optimizer.lr_schedule in DECAYS:
        return optimizer.decay_steps is not None
    return optimizer.lr_schedule != "extension" and optimizer.cooldown_tokens is None


LENGTH = OnResume("meant", is_layout=_length_is_free)


class TrainConfig(Section):
    """A run's length and batches. Give exactly one of `steps`, `tokens` and the run's phases."""

    steps: Annotated[Count | None, LENGTH] = Field(None, gt=0, le=MOST_STEPS, description="length in optimizer steps")
    tokens: Annotated[Count | None, LENGTH] = Field(
        None, gt=0, description="length in tokens, rounded up to whole steps"
    )
    global_batch_size: Count = Field(gt=0, description="samples per optimizer step, over all ranks")
    micro_batch_size: Annotated[Count, LAYOUT] = Field(1, gt=0, description="samples per forward of one pipeline")
    phase: Annotated[str | None, LAYOUT] = Field(
        None, description="phase whose fields these are; a training run finds it by its consumed tokens"
    )
    seed: Annotated[int, MEANT] = Field(1234, ge=0, description="seed of initial weights, data order and dropout")


class EvalConfig(Section):
    """Validation during training."""

    on_resume: ClassVar[OnResume | None] = LAYOUT

    interval: Count | None = Field(None, gt=0, description="steps between validations; null: no validation")
    steps: Count = Field(8, gt=0, description="global batches per validation")


class OptimizerConfig(Section):
    """The optimizer, with ZeRO-1 sharding. `engine/config/values/optimizer_kinds.py` lists fields that only one optimizer reads."""

    on_resume: ClassVar[OnResume | None] = MEANT

    name: Annotated[OptimizerName, OnResume("never")] = Field(
        "adamw", description="adamw: AdamW (1711.05101); sgd: SGD with momentum; extension: model.extension's"
    )
    lr: float = Field(3e-4, gt=0, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the decay")
    lr_schedule: Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd", "extension"] = Field(
        "cosine",
        description="decay to min_lr after the warm-up; wsd: constant, then a fall; extension: model.extension's",
    )
    warmup_steps: Count = Field(0, ge=0, description="steps of linear warm-up to lr")
    warmup_tokens: Count | None = Field(None, gt=0, description="the warm-up in tokens; null: warmup_steps")
    decay_steps: Count | None = Field(
        None, gt=0, description="cosine, linear: step at which min_lr is reached; null: the last step"
    )
    cooldown_tokens: Count | None = Field(
        None, gt=0, description="wsd, inverse_sqrt: tokens of the fall to min_lr at the end of the run"
    )
    cooldown_shape: Literal["linear", "cosine", "sqrt", "exponential"] = Field(
        "linear", description="shape of that fall"
    )
    weight_decay: float = Field(0.1, ge=0, description="decay of matrices; norms and biases are not decayed")
    beta1: float = Field(0.9, ge=0, lt=1, description="adamw: decay of the mean of gradients")
    beta2: float = Field(0.95, ge=0, lt=1, description="adamw: decay of the mean of squared gradients")
    eps: float = Field(1e-8, gt=0, description="adamw: added to the root of the second moment")
    momentum: float = Field(0.9, gt=0, lt=1, description="sgd: decay of the sum of gradients")
    clip_grad: float | None = Field(1.0, gt=0, description="largest global gradient norm; null: no clipping")
    groups: list[GroupFields] = Field(
        default_factory=list, description="parameters by pattern, first match wins: weight_decay, lr_factor"
    )
    ema: EmaConfig | None = Field(None, description="moving average of the weights; null: none")
    offload: Annotated[Literal["none", "cpu"], LAYOUT] = Field(
        "none", description="place of the state between updates: the device, or host memory (cpu), with equal results"
    )
    bucket_bytes: Annotated[int, LAYOUT] = Field(64 * 2**20, gt=0, description="bytes of main grads per reduce-scatter")


class PrecisionConfig(Section):
    """A run's dtypes; sums that must not lose bits use at least fp32."""

    dtype: Annotated[Literal["bf16", "fp16", "fp32", "float64"], MEANT] = Field(
        "bf16", description="dtype of weights and activations"
    )
    # Both forms keep the masters exactly.
    masters: Annotated[Literal["full", "split"], LAYOUT] = Field(
        "full", description="exact weights of a bf16 run: fp32 copies (full), or 16 more bits per weight (split)"
    )
    moments: Annotated[Literal["full", "bf16"], MEANT] = Field(
        "full", description="optimizer moments: in the accumulation dtype (full), or rounded to bf16"
    )
    gradients: Annotated[Literal["full", "bf16"], MEANT] = Field(
        "full", description="sums and reductions of gradients: accumulation dtype (full), or bf16, each sum rounded"
    )
    loss_scale: Annotated[LossScaleConfig | None, MEANT] = Field(
        None, description="loss scaling of an fp16 run; null: dynamic, from 2^16, with the defaults of this section"
    )
    fp8: Annotated[Fp8Config | None, MEANT] = Field(
        None, description="GEMMs of linear layers with FP8 operands; null: in the run's dtype"
    )

    @property
    def scaling(self) -> LossScaleConfig | None:
        """The run's loss-scale settings; None unless its dtype is fp16."""
        return (self.loss_scale or LossScaleConfig()) if self.dtype == "fp16" else None
