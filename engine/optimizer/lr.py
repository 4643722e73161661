"""The learning rate as a function of consumed tokens: a linear warm-up, and then one of several ways down.

    lr  |    /‾‾‾\\           warm-up   lr x (tokens after the step) / warm-up: the first step has a rate
        |   /     `\\         decay     cosine, linear: from the end of the warm-up to `decay_steps`, or the end of the run
        |  /        `--._    inverse_sqrt   lr sqrt(warm-up / tokens before the step)
    min | /              `-- wsd       lr until the last `cooldown_tokens` of the run, in which it falls (2405.18392)
        +-+---------------+> tokens

A pure function of the tokens: a resumed run, another layout, or another batch size has the same rates at the same tokens.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from triaxis.engine.config.training import DECAYS, OptimizerConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError

SHAPES: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "linear": lambda x: 1 - x,
        "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
        "sqrt": lambda x: 1 - math.sqrt(x),
        "exponential": lambda x: 2 * 0.5**x - 1,
    }
)
"""The share of a fall that is left after a share x of its tokens.

Sources: 1608.03983 (cosine), 2405.18392 (1 - sqrt), Megatron-Core's `OptimizerParamScheduler` (exponential)."""


def learning_rate(consumed_tokens: int, step_tokens: int, optimizer: OptimizerConfig, num_tokens: int) -> float:
    """Compute the learning rate of one step's update.

    Args:
        consumed_tokens: tokens consumed before the step.
        step_tokens: tokens of the step; settings in steps count so many tokens for each.
        optimizer: `lr`, `min_lr`, and the fields of warm-up, decay and cooldown.
        num_tokens: tokens of the whole run. A step that begins at its end, or later, has the last rate. The last step of the run
            is just above it: with min_lr = 0 no step is wasted.
    """
    warmup = warmup_tokens(optimizer, step_tokens)
    if consumed_tokens < warmup:
        return optimizer.lr * min(1.0, (consumed_tokens + step_tokens) / warmup)
    fall = fall_of(optimizer, step_tokens, num_tokens)
    if fall is None:
        return _undecayed(consumed_tokens, optimizer, max(warmup, step_tokens))
    done, length = consumed_tokens - fall.start, fall.end - fall.start
    if optimizer.lr_schedule in DECAYS:
        return _fallen(optimizer.lr, optimizer.min_lr, fall.shape, done, length)
    rate = _undecayed(min(consumed_tokens, fall.start), optimizer, max(warmup, step_tokens))
    # An inverse root may be below min_lr by then, and stays there.
    return _fallen(rate, min(rate, optimizer.min_lr), fall.shape, done, length)


def rate_of(config: Config, consumed_tokens: int, step_tokens: int, num_tokens: int) -> float:
    """Compute the learning rate of one step of a run, by the schedule of its extension where that is asked for.

    Raises:
        ConfigError: the extension's rate is below 0, or not finite.
    """
    optimizer = config.optimizer
    own = config.model.own.schedule if optimizer.lr_schedule == "extension" else None
    if own is None or consumed_tokens < warmup_tokens(optimizer, step_tokens):
        return learning_rate(consumed_tokens, step_tokens, optimizer, num_tokens)
    rate = float(own(consumed_tokens, step_tokens, optimizer, num_tokens))
    if not 0 <= rate < math.inf:
        raise ConfigError(
            [
                f"the schedule of model.extension gives the learning rate {rate} at {consumed_tokens:,} tokens: it must be finite "
                "and at least 0, or the update would ruin the weights. Mend the function."
            ]
        )
    return rate


class Fall(NamedTuple):
    """The fall of the rate to `min_lr`: its form in `SHAPES`, and the tokens at its start and its end."""

    shape: str
    start: int
    end: int


def fall_of(optimizer: OptimizerConfig, step_tokens: int, num_tokens: int) -> Fall | None:
    """Return the fall of a schedule, with the arguments of `learning_rate`; None: the rate does not fall to `min_lr`."""
    if optimizer.lr_schedule in DECAYS:
        end = num_tokens if optimizer.decay_steps is None else optimizer.decay_steps * step_tokens
        return Fall(optimizer.lr_schedule, warmup_tokens(optimizer, step_tokens), end)
    if optimizer.cooldown_tokens is None:
        return None
    return Fall(optimizer.cooldown_shape, num_tokens - optimizer.cooldown_tokens, num_tokens)


def warmup_tokens(optimizer: OptimizerConfig, step_tokens: int) -> int:
    """Return the number of tokens in the warm-up; `warmup_steps` have `step_tokens` each."""
    return optimizer.warmup_steps * step_tokens if optimizer.warmup_tokens is None else optimizer.warmup_tokens


def _undecayed(consumed_tokens: int, optimizer: OptimizerConfig, warmup: int) -> float:
    """Return the rate between warm-up and cooldown; an inverse root begins at `warmup`, at least one step."""
    if optimizer.lr_schedule != "inverse_sqrt":
        return optimizer.lr
    return optimizer.lr * math.sqrt(warmup / max(consumed_tokens, warmup))


def _fallen(rate: float, floor: float, shape: str, done: int, length: int) -> float:
    """Return the rate when `done` of the `length` tokens of its fall to `floor` are consumed."""
    if done <= 0 < length:
        return rate
    return floor if done >= length else floor + (rate - floor) * SHAPES[shape](done / length)
