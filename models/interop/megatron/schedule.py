"""Convert Megatron-LM's learning-rate arguments to ours, and back.

Each Megatron-LM style (first line) becomes one of our schedules (second line):

lr_decay_style    constant, linear, cosine     inverse-square-root     WSD with lr_wsd_decay_iters, lr_wsd_decay_style
lr_schedule       the same                     inverse_sqrt            wsd with cooldown_tokens, cooldown_shape

Notes say where the rates differ. A warm-up over W steps to the learning rate lr has these rates in Megatron-LM ("there") and here:

steps done before 0      1            W - 1       W
rate there        0      lr / W       ..          lr       the first step has rate 0 and changes nothing
rate here         lr/W   2 lr / W     lr          lr       both are equal once W steps are done
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from triaxis.engine.config.names.megatron_arguments import ARGUMENTS
from triaxis.engine.config.quantities.plan import planned_steps
from triaxis.engine.config.schema.training import DECAYS, OptimizerConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError, shown
from triaxis.engine.optimizer.lr import SHAPES, learning_rate
from triaxis.models.interop.rate_notes import differing_rates

STYLES, WSD_STYLES = (ARGUMENTS[name].accepted for name in ("lr-decay-style", "lr-wsd-decay-style"))
"""STYLES: their `lr_decay_style` -> our `optimizer.lr_schedule`. WSD_STYLES: their `lr_wsd_decay_style` -> our `cooldown_shape`."""

_NUMBERS = (
    "lr",
    "min_lr",
    "lr_warmup_init",
    "lr_warmup_fraction",
    *(f"{name}_{unit}" for name in ("train", "lr_decay", "lr_warmup", "lr_wsd_decay") for unit in ("iters", "samples")),
    "global_batch_size",
    "seq_length",
)

_LARGEST = 2**63


class MegatronRates(NamedTuple):
    """Megatron-LM's learning rates, as in Megatron-Core 0.16's `OptimizerParamScheduler`.

    Attributes:
        style: `lr_decay_style`.
        lr, first, min_lr: the scheduler's max_lr, init_lr and min_lr.
        warmup: length of the warm-up, in samples.
        length: length of the whole schedule, in samples.
        fall: length of the decay at the end of WSD, in samples.
        fall_style: `lr_wsd_decay_style`.
    """

    style: str
    lr: float
    first: float
    min_lr: float
    warmup: float
    length: int
    fall: int
    fall_style: str

    def rate(self, samples: int) -> float:
        """Compute the learning rate of the step that starts after `samples` samples."""
        if self.warmup > 0 and samples <= self.warmup:
            return self.first + (self.lr - self.first) * samples / self.warmup
        if self.style == "constant":
            return self.lr
        if samples > self.length:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(samples, 1)))
        start, shape = self.warmup, self.style
        if self.style == "WSD":
            start, shape = self.length - self.fall, WSD_STYLES[self.fall_style]
        if samples <= start:
            return self.lr
        return self.min_lr + (self.lr - self.min_lr) * SHAPES[shape]((samples - start) / (self.length - start))


def megatron_rates(args: Mapping[str, Any]) -> MegatronRates | None:
    """Build the schedule that Megatron-LM derives from its arguments.

    None if the arguments lack the run's length, batch size, sample length or rate.

    Raises:
        TypeError: a length, size or rate is no number below 2^63.
    """
    for name in _NUMBERS:
        value = args.get(name)
        if value is not None and not (isinstance(value, int | float) and abs(value) < _LARGEST):
            raise TypeError(f"{name} = {shown(value)}: must be a number below 2^63")
    # A run configured in samples also records its iterations once it has started.
    unit = "samples" if args.get("train_samples") else "iters"
    if not all(args.get(name) for name in ("lr", f"train_{unit}", "global_batch_size", "seq_length")):
        return None
    each = 1 if unit == "samples" else args["global_batch_size"]
    length = (args.get(f"lr_decay_{unit}") or args[f"train_{unit}"]) * each
    fraction = args.get("lr_warmup_fraction")
    return MegatronRates(
        style=args.get("lr_decay_style", "linear"),
        lr=args["lr"],
        first=args.get("lr_warmup_init") or 0.0,
        min_lr=args.get("min_lr") or 0.0,
        warmup=(args.get(f"lr_warmup_{unit}") or 0) * each if fraction is None else fraction * length,
        length=length,
        fall=(args.get(f"lr_wsd_decay_{unit}") or 0) * each,
        fall_style=args.get("lr_wsd_decay_style", "exponential"),
    )


def schedule_fields(args: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Convert the arguments to `optimizer` fields.

    Also returns notes on how our rates will differ from Megatron-LM's. The fields are {} if Triaxis lacks the schedule that
    `lr_decay_style` or `lr_wsd_decay_style` names. They are also {} if the arguments lack the run's length, batch or learning rate.
    The note then says so.

    Raises:
        TypeError: a length, size or rate is no number below 2^63.
    """
    there = megatron_rates(args)
    for name, known in (("lr_decay_style", STYLES), ("lr_wsd_decay_style", WSD_STYLES)):
        if args.get(name) is not None and args[name] not in known:
            return {}, [f"{name} = {args[name]} is not built: choose optimizer.lr_schedule"]
    if there is None:
        return {}, [
            "the arguments do not say the run's length, its batch or its learning rate: set train.steps, and in optimizer lr, "
            "lr_schedule, warmup_steps and decay_steps"
        ]
    fields: dict[str, Any] = {"lr_schedule": STYLES[there.style]}
    steps = there.warmup / args["global_batch_size"]
    if math.isclose(steps, round(steps)):
        fields["warmup_steps"] = round(steps)
    else:
        fields["warmup_tokens"] = round(there.warmup * args["seq_length"])
    if fields["lr_schedule"] in DECAYS:
        # Megatron-LM's schedule is as long as the run by default. Here it keeps its length if the run's length changes.
        fields["decay_steps"] = max(1, round(there.length / args["global_batch_size"]))
    elif there.style == "WSD":
        if not there.fall:
            return fields, ["the fall at the end of WSD has no length: set optimizer.cooldown_tokens"]
        fields["cooldown_tokens"] = there.fall * args["seq_length"]
        fields["cooldown_shape"] = WSD_STYLES[there.fall_style]
    if fields["lr_schedule"] in DECAYS or "cooldown_tokens" in fields:
        fields["min_lr"] = there.min_lr
    # Illegal fields are reported later, when the whole config is validated.
    return fields, rate_notes(args, OptimizerConfig.model_construct(lr=there.lr, **fields))


def schedule_args(config: Config) -> dict[str, Any]:
    """Convert the learning-rate schedule to Megatron-LM's arguments.

    Lengths in tokens become whole iterations, rounded up.

    Raises:
        ConfigError: an extension provides the schedule.
    """
    optimizer = config.optimizer
    if optimizer.lr_schedule == "extension":
        raise ConfigError(
            [
                "optimizer.lr_schedule = extension: Megatron-LM does not know your schedule, and would go on with another rate. "
                "Export only the weights: --weights-only."
            ]
        )
    step_tokens = config.train.global_batch_size * config.model.seq_length
    warmup = optimizer.warmup_steps if optimizer.warmup_tokens is None else -(-optimizer.warmup_tokens // step_tokens)
    if optimizer.lr_schedule == "inverse_sqrt":
        # With no warm-up, the inverse root starts at one step here and at one sample in Megatron-LM.
        warmup = max(warmup, 1)
    args = {
        "min_lr": optimizer.min_lr,
        "lr_decay_style": next(theirs for theirs, ours in STYLES.items() if ours == optimizer.lr_schedule),
        "lr_decay_iters": optimizer.decay_steps or planned_steps(config),
        "lr_warmup_iters": warmup,
    }
    if optimizer.lr_schedule == "wsd" and optimizer.cooldown_tokens is not None:
        args["lr_wsd_decay_iters"] = -(-optimizer.cooldown_tokens // step_tokens)
        args["lr_wsd_decay_style"] = next(
            theirs for theirs, ours in WSD_STYLES.items() if ours == optimizer.cooldown_shape
        )
    return args


def export_notes(args: Mapping[str, Any], config: Config) -> list[str]:
    """Build notes on how the learning rates from `args` differ from the config's.

    `args` are Megatron-LM's arguments for the whole run. For a run with phases, the only note is that nothing was compared.
    """
    if config.phases:
        return [
            "the rates of a run with phases were not compared: they follow tokens, and Megatron-LM's follow samples of one length"
        ]
    return rate_notes(args, config.optimizer)


def rate_notes(args: Mapping[str, Any], optimizer: OptimizerConfig) -> list[str]:
    """Compare Megatron-LM's learning rates with ours.

    If they differ, there is one note (`differing_rates`).

    Args:
        args: Megatron-LM's arguments for the whole run.
        optimizer: our `optimizer` section; its fields need not be legal yet.
    """
    there = megatron_rates(args)
    if there is None:
        return []
    batch = args["global_batch_size"]
    step_tokens, num_steps = batch * args["seq_length"], int(args.get("train_iters") or args["train_samples"] // batch)
    ends = (int(end // batch) for end in (0, there.warmup, there.length - there.fall, there.length))
    return differing_rates(
        lambda step: there.rate(step * batch),
        lambda step: learning_rate(step * step_tokens, step_tokens, optimizer, num_steps * step_tokens),
        ends,
        num_steps,
        there.lr,
        "Megatron-LM",
    )
