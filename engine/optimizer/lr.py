"""Learning-rate schedules over consumed tokens: a linear warm-up, then one of several ways down.

    lr  |    /‾‾‾\\           warm-up   lr x (tokens after the step) / warm-up: the first step's rate is above 0
        |   /     `\\         decay     cosine, linear: from the warm-up's end to `decay_steps`, or to the run's end
        |  /        `--._    inverse_sqrt   lr sqrt(warm-up / tokens before the step)
    min | /              `-- wsd       lr, until it falls over the run's last `cooldown_tokens` (2405.18392)
        +-+---------------+> tokens

The rate depends on tokens alone: a resumed run, another layout or another batch size has the same rates at the same tokens.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from triaxis.engine.config.schema.training import DECAYS, OptimizerConfig
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
"""Share of a fall still to come once a share x of its tokens is consumed.

Sources: 1608.03983 (cosine), 2405.18392 (1 - sqrt), Megatron-Core's `OptimizerParamScheduler` (exponential)."""


def learning_rate(consumed_tokens: int, step_tokens: int, optimizer: OptimizerConfig, num_tokens: int) -> float:
    """Compute the learning rate for one step's update.

    Args:
        consumed_tokens: tokens consumed before the step.
        step_tokens: tokens per step; settings in steps count this many tokens each.
        optimizer: `lr`, `min_lr`, and the fields for warm-up, decay and cooldown.
        num_tokens: tokens in the whole run. A step that begins at the end or later has the final rate. The run's last step has
            a slightly higher rate, so with min_lr = 0 no step is wasted.
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
    # An inverse root that is already below min_lr stays there.
    return _fallen(rate, min(rate, optimizer.min_lr), fall.shape, done, length)


def rate_of(config: Config, consumed_tokens: int, step_tokens: int, num_tokens: int) -> float:
    """Compute the learning rate for one step; after the warm-up, an extension's schedule applies if the run asks for it.

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
    """A fall to `min_lr`: its form in `SHAPES`, and the token counts at its start and end."""

    shape: str
    start: int
    end: int


def fall_of(optimizer: OptimizerConfig, step_tokens: int, num_tokens: int) -> Fall | None:
    """Find the shape, start and end of the decay or cooldown to `min_lr`. None if there is none.

    The arguments are those of `learning_rate`.
    """
    if optimizer.lr_schedule in DECAYS:
        end = num_tokens if optimizer.decay_steps is None else optimizer.decay_steps * step_tokens
        return Fall(optimizer.lr_schedule, warmup_tokens(optimizer, step_tokens), end)
    if optimizer.cooldown_tokens is None:
        return None
    return Fall(optimizer.cooldown_shape, num_tokens - optimizer.cooldown_tokens, num_tokens)


def warmup_tokens(optimizer: OptimizerConfig, step_tokens: int) -> int:
    """Compute the warm-up's length in tokens; each of `warmup_steps` has `step_tokens`."""
    return optimizer.warmup_steps * step_tokens if optimizer.warmup_tokens is None else optimizer.warmup_tokens


def _undecayed(consumed_tokens: int, optimizer: OptimizerConfig, warmup: int) -> float:
    """Compute the rate after the warm-up, before any fall to `min_lr`.

    `warmup` is in tokens. For `inverse_sqrt`, the caller passes at least one step's tokens.
    """
    if optimizer.lr_schedule != "inverse_sqrt":
        return optimizer.lr
    return optimizer.lr * math.sqrt(warmup / max(consumed_tokens, warmup))


def _fallen(rate: float, floor: float, shape: str, done: int, length: int) -> float:
    """Compute the rate when `done` tokens are consumed in a fall to `floor` that takes `length` tokens."""
    if done <= 0 < length:
        return rate
    return floor if done >= length else floor + (rate - floor) * SHAPES[shape](done / length)
