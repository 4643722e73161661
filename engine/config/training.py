"""The `train`, `optimizer` and `precision` sections and their rules."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from triaxis.engine.config.counts import Count
from triaxis.engine.config.ema import EmaConfig
from triaxis.engine.config.fp8 import FP8_RULES, Fp8Config
from triaxis.engine.config.groups import GROUP_RULES, GroupFields
from triaxis.engine.config.loss_scale import LOSS_SCALE_RULES, LossScaleConfig
from triaxis.engine.config.optimizer_kinds import OPTIMIZERS, OptimizerName
from triaxis.engine.config.plan import partial_batch, planned_steps, planned_tokens
from triaxis.engine.config.section import LAYOUT, MEANT, OnResume, Problem, Rule, Section, Subject, divisors, multiples

MOST_STEPS = 2**40
"""Maximum optimizer steps in a run; at one step per millisecond they would take 35 years."""

MOST_MICROBATCHES = 2**17
"""Maximum microbatches per pipeline and step: a schedule lists a forward and a backward for each."""

LARGEST_BETA_IN_BF16 = 0.99
"""Largest beta for a bf16 moment. With 8 significant bits, a moment stops moving once it is within a share 2^-9 / (1 - beta) of the
mean that it tracks: 20 % at this beta."""


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


def _length_is_free(subject: Subject) -> bool:
    """Whether no step's learning rate depends on the run's length; then a longer run has the same steps, and more after them."""
    optimizer = subject.config.optimizer
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
    """The optimizer, with ZeRO-1 sharding. `engine/config/optimizer_kinds.py` lists fields that only one optimizer reads."""

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


def batch_is_whole_microbatches(subject: Subject) -> Iterator[Problem]:
    train, dp = subject.config.train, subject.dp
    if rule := partial_batch(train, dp):
        yield subject.problem(
            "train.global_batch_size",
            rule,
            {
                "train.global_batch_size": multiples(train.micro_batch_size * (dp or 1), train.global_batch_size),
                "train.micro_batch_size": divisors(train.global_batch_size, train.micro_batch_size),
                "parallel.dp": divisors(train.global_batch_size, dp) if dp is not None else [],
            },
        )


def microbatches_can_be_listed(subject: Subject) -> Iterator[Problem]:
    train, dp = subject.config.train, subject.dp or 1
    num_microbatches = train.global_batch_size // (train.micro_batch_size * dp)
    if num_microbatches > MOST_MICROBATCHES:
        most = MOST_MICROBATCHES * train.micro_batch_size * dp
        yield subject.problem(
            "train.global_batch_size",
            f"makes {num_microbatches:,} microbatches per pipeline and step, and at most {MOST_MICROBATCHES:,} are planned: a "
            "schedule lists each of them, and would not fit in memory",
            {"train.global_batch_size": [most]},
        )


def run_has_one_length(subject: Subject) -> Iterator[Problem]:
    train, phases = subject.config.train, subject.config.phases
    if phases:
        for key in ("steps", "tokens"):
            if getattr(train, key) is not None:
                yield subject.problem(
                    f"train.{key}",
                    f"the phases are given too, and the last one ends the run at {phases[-1]['until']:,} tokens: one of both would "
                    "be ignored",
                    {f"train.{key}": [None]},
                )
        return
    if train.steps is None and train.tokens is None:
        yield subject.problem(
            "train.steps",
            "train.steps or train.tokens must be given: the run would have no end, and the learning rate no schedule",
            advice="Set one of them.",
        )
    if train.steps is not None and train.tokens is not None:
        yield subject.problem(
            "train.steps",
            f"train.tokens = {train.tokens} is given too: both say how long the run is, and one would be ignored",
            {"train.steps": [None], "train.tokens": [None]},
        )


def warmup_ends(subject: Subject) -> Iterator[Problem]:
    optimizer, num_steps = subject.config.optimizer, planned_steps(subject.config)
    if num_steps is not None and optimizer.warmup_steps > num_steps:
        yield subject.problem(
            "optimizer.warmup_steps",
            f"must be at most the {num_steps} steps of the run: it would end before the learning rate reaches its peak",
            {"optimizer.warmup_steps": [num_steps], "train.steps": [optimizer.warmup_steps]},
        )
    if optimizer.warmup_tokens is not None:
        yield from _warmup_in_tokens(subject)
    if optimizer.decay_steps is not None and optimizer.decay_steps <= optimizer.warmup_steps:
        yield subject.problem(
            "optimizer.decay_steps",
            f"must be more than warmup_steps = {optimizer.warmup_steps}: the decay would end before it begins",
            {"optimizer.decay_steps": [optimizer.warmup_steps + 1, None]},
        )


def _warmup_in_tokens(subject: Subject) -> Iterator[Problem]:
    optimizer, num_tokens = subject.config.optimizer, planned_tokens(subject.config)
    if optimizer.warmup_steps:
        yield subject.problem(
            "optimizer.warmup_tokens",
            f"warmup_steps = {optimizer.warmup_steps} is given too: both say how long the warm-up is, and one would be ignored",
            {"optimizer.warmup_tokens": [None], "optimizer.warmup_steps": [0]},
        )
    if num_tokens is not None and optimizer.warmup_tokens is not None and optimizer.warmup_tokens > num_tokens:
        yield subject.problem(
            "optimizer.warmup_tokens",
            f"must be at most the {num_tokens:,} tokens of the run: it would end before the learning rate reaches its peak",
            {"optimizer.warmup_tokens": [num_tokens]},
        )


def cooldown_ends_the_run(subject: Subject) -> Iterator[Problem]:
    """Yield a problem for each cooldown or decay field that has no effect or does not fit into the run."""
    config, optimizer = subject.config, subject.config.optimizer
    name, cooldown = optimizer.lr_schedule, optimizer.cooldown_tokens
    if name == "extension":
        return  # an extension's schedule may read any field
    if name not in DECAYS and optimizer.decay_steps is not None:
        yield subject.problem(
            "optimizer.decay_steps",
            f"has no effect with lr_schedule = {name}, which does not decay from the warm-up on",
            {"optimizer.decay_steps": [None], "optimizer.lr_schedule": list(DECAYS)},
        )
    if cooldown is None:
        if name == "wsd":
            yield subject.problem(
                "optimizer.cooldown_tokens",
                "must be given with lr_schedule = wsd: the length of the last fall would be a guess",
                {"optimizer.lr_schedule": ["constant"]},
                "A tenth to a fifth of the run is usual.",
            )
        if optimizer.cooldown_shape != "linear":
            yield subject.problem(
                "optimizer.cooldown_shape",
                "is the shape of a fall of cooldown_tokens, which is not given: it would have no effect",
                {"optimizer.cooldown_shape": ["linear"]},
            )
        return
    if name in (*DECAYS, "constant"):
        yield subject.problem(
            "optimizer.cooldown_tokens",
            f"is the fall at the end of wsd or inverse_sqrt, and lr_schedule = {name}: it would have no effect",
            {"optimizer.cooldown_tokens": [None], "optimizer.lr_schedule": ["wsd", "inverse_sqrt"]},
        )
        return
    num_tokens = planned_tokens(config)
    if num_tokens is None:
        return
    step_tokens = config.train.global_batch_size * config.model.seq_length
    warmup = optimizer.warmup_steps * step_tokens if optimizer.warmup_tokens is None else optimizer.warmup_tokens
    if warmup + cooldown > num_tokens:
        yield subject.problem(
            "optimizer.cooldown_tokens",
            f"must be at most {max(0, num_tokens - warmup):,}, the tokens of the run behind the warm-up: the fall would begin "
            "before the learning rate reaches its peak",
            {"optimizer.cooldown_tokens": [num_tokens - warmup]},
        )


def decay_goes_down(subject: Subject) -> Iterator[Problem]:
    optimizer = subject.config.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield subject.problem(
            "optimizer.min_lr",
            f"must be at most lr = {optimizer.lr:g}: the learning rate would rise at the end",
            {"optimizer.min_lr": [optimizer.lr / 10], "optimizer.lr": [optimizer.min_lr]},
        )
    if (
        optimizer.min_lr > 0
        and optimizer.lr_schedule not in (*DECAYS, "extension")
        and optimizer.cooldown_tokens is None
    ):
        yield subject.problem(
            "optimizer.min_lr",
            f"has no effect with lr_schedule = {optimizer.lr_schedule} without a cooldown: the learning rate does not fall to it",
            {"optimizer.min_lr": [0.0], "optimizer.lr_schedule": list(DECAYS)},
        )


def bucket_holds_a_number(subject: Subject) -> Iterator[Problem]:
    element_bytes = 8 if subject.config.precision.dtype == "float64" else 4
    bucket_bytes = subject.config.optimizer.bucket_bytes
    if bucket_bytes < element_bytes:
        yield subject.problem(
            "optimizer.bucket_bytes",
            f"must hold at least one main grad of {element_bytes} bytes: no bucket would ever fill",
            {"optimizer.bucket_bytes": [element_bytes, 64 * 2**20]},
        )


def narrow_state_fits(subject: Subject) -> Iterator[Problem]:
    precision, optimizer = subject.config.precision, subject.config.optimizer
    for key, value in (("masters", "split"), ("moments", "bf16"), ("gradients", "bf16")):
        if getattr(precision, key) == value and precision.dtype != "bf16":
            yield subject.problem(
                f"precision.{key}",
                f"is for weights in bf16, but precision.dtype = {precision.dtype}: there gradients and optimizer state are as "
                "exact as the weights",
                {f"precision.{key}": ["full"], "precision.dtype": ["bf16"]},
            )
    if precision.moments == "bf16":
        for key in (moment.decay for moment in OPTIMIZERS[optimizer.name].moments.values()):
            beta = getattr(optimizer, key)
            if beta > LARGEST_BETA_IN_BF16:
                yield subject.problem(
                    f"optimizer.{key}",
                    f"must be at most {LARGEST_BETA_IN_BF16} with precision.moments = bf16: a step changes the moment by less than "
                    "half of its last bit unless it is far off, so it would stand still",
                    {f"optimizer.{key}": [LARGEST_BETA_IN_BF16], "precision.moments": ["full"]},
                )


def fields_are_of_the_optimizer(subject: Subject) -> Iterator[Problem]:
    optimizer = subject.config.optimizer
    if optimizer.name == "extension":
        return
    for other in OPTIMIZERS.values():
        for key in sorted(other.fields.keys() - OPTIMIZERS[optimizer.name].fields.keys()):
            value, default = getattr(optimizer, key), OptimizerConfig.model_fields[key].default
            if value != default:
                yield subject.problem(
                    f"optimizer.{key}",
                    f"is a field of {other.title}, and optimizer.name = {optimizer.name}: it would have no effect",
                    {f"optimizer.{key}": [default]},
                )


TRAINING_RULES: tuple[Rule, ...] = (
    batch_is_whole_microbatches,
    microbatches_can_be_listed,
    run_has_one_length,
    warmup_ends,
    cooldown_ends_the_run,
    decay_goes_down,
    bucket_holds_a_number,
    narrow_state_fits,
    *LOSS_SCALE_RULES,
    *FP8_RULES,
    *GROUP_RULES,
    fields_are_of_the_optimizer,
)
