"""Megatron-LM's arguments of the learning rate as ours, and back (no torch here).

lr_decay_style    constant, linear, cosine     inverse-square-root     WSD with lr_wsd_decay_iters, lr_wsd_decay_style
lr_schedule       the same                     inverse_sqrt            wsd with cooldown_tokens, cooldown_shape
"""

from collections.abc import Mapping
from typing import Any

from triaxis.engine.config.plan import planned_steps
from triaxis.engine.config.training import DECAYS
from triaxis.engine.config.tree import Config

_STYLES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}
_SHAPES = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "sqrt"}

ARGUMENTS = (
    "min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_warmup_iters",
    "lr_warmup_fraction",
    "lr_wsd_decay_style",
    "lr_wsd_decay_iters",
)


def schedule_fields(args: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return fields of our `optimizer`, and notes on what has no counterpart."""
    style = args.get("lr_decay_style", "linear")
    if style not in _STYLES:
        return {}, [f"lr_decay_style = {style} is not built: choose optimizer.lr_schedule"]
    fields: dict[str, Any] = {"lr_schedule": _STYLES[style]}
    notes: list[str] = []
    length = args.get("lr_decay_iters") or args.get("train_iters")
    if length:
        # A schedule over the whole run is given as such there; here it keeps its length when the run gets another one.
        warmup = args.get("lr_warmup_iters") or (args.get("lr_warmup_fraction") or 0) * length
        fields["warmup_steps"] = round(warmup)
    else:
        notes.append("the run and its schedule count samples: set train.steps, optimizer.decay_steps and warmup_steps")
    if fields["lr_schedule"] in DECAYS:
        fields["decay_steps"] = length
    elif style == "WSD":
        notes += _cooldown(args, fields)
    min_lr = args.get("min_lr") or 0.0
    if fields["lr_schedule"] in DECAYS or "cooldown_tokens" in fields:
        fields["min_lr"] = min_lr
    elif min_lr and style == "inverse-square-root":
        notes.append(
            f"min_lr = {min_lr:g} is a floor of the inverse root there: here it falls on, to a cooldown if there is one"
        )
    return {name: value for name, value in fields.items() if value is not None}, notes


def _cooldown(args: Mapping[str, Any], fields: dict[str, Any]) -> list[str]:
    """Add the fall at the end of WSD to `fields`; return notes."""
    num_iters, batch, length = (args.get(name) for name in ("lr_wsd_decay_iters", "global_batch_size", "seq_length"))
    if not (num_iters and batch and length):
        return ["the fall at the end of WSD has no length in iterations: set optimizer.cooldown_tokens"]
    fields["cooldown_tokens"] = num_iters * batch * length
    shape = args.get("lr_wsd_decay_style", "exponential")
    if shape not in _SHAPES:
        return [f"lr_wsd_decay_style = {shape} is not built: the fall is a line, or choose optimizer.cooldown_shape"]
    fields["cooldown_shape"] = _SHAPES[shape]
    return []


def schedule_args(config: Config) -> dict[str, Any]:
    """Return Megatron's arguments for our learning rate; tokens become whole iterations, rounded up."""
    optimizer = config.optimizer
    step_tokens = config.train.global_batch_size * config.model.seq_length
    warmup = optimizer.warmup_steps if optimizer.warmup_tokens is None else -(-optimizer.warmup_tokens // step_tokens)
    args = {
        "min_lr": optimizer.min_lr,
        "lr_decay_style": next(theirs for theirs, ours in _STYLES.items() if ours == optimizer.lr_schedule),
        "lr_decay_iters": optimizer.decay_steps or planned_steps(config),
        "lr_warmup_iters": warmup,
    }
    if optimizer.lr_schedule == "wsd" and optimizer.cooldown_tokens is not None:
        args["lr_wsd_decay_iters"] = -(-optimizer.cooldown_tokens // step_tokens)
        args["lr_wsd_decay_style"] = next(
            theirs for theirs, ours in _SHAPES.items() if ours == optimizer.cooldown_shape
        )
    return args
