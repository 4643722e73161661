"""The learning rate of a step: linear warm-up, then a decay (no torch here).

    lr  |      /‾‾‾\\                  warm-up   lr (step + 1) / warmup_steps: the first step trains at lr / warmup_steps,
        |     /      `\\               peak      lr at steps warmup_steps - 1 and warmup_steps
        |    /          `--.          decay     from lr at warmup_steps to min_lr at decay_steps
    min |   /               `-----    after     min_lr
        +--+----+-----------+----> step

A pure function of the step: a resumed run, or another layout, has the same rates.
"""

import math

from engine.config.training import OptimizerConfig


def learning_rate(step: int, optimizer: OptimizerConfig, num_steps: int) -> float:
    """Return the learning rate with which step `step` updates the weights.

    Args:
        step: counts from 0.
        optimizer: `lr`, `min_lr`, `lr_schedule`, `warmup_steps`, `decay_steps`.
        num_steps: length of the run; `decay_steps` where the config has none. The last step, num_steps - 1, is just above `min_lr`:
            with min_lr = 0 no step is wasted.

    Returns:
        `lr (step + 1) / warmup_steps` during the warm-up. Then, with x = (step - warmup_steps) / (decay_steps - warmup_steps):
        cosine `min_lr + (lr - min_lr) (1 + cos(pi x)) / 2` (1608.03983), linear `lr + (min_lr - lr) x`, from decay_steps on
        `min_lr`; constant: `lr` to the end.
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    if optimizer.lr_schedule == "constant":
        return optimizer.lr
    decay_steps = optimizer.decay_steps or num_steps
    if step >= decay_steps:
        return optimizer.min_lr
    done = (step - optimizer.warmup_steps) / (decay_steps - optimizer.warmup_steps)
    remaining = (1 + math.cos(math.pi * done)) / 2 if optimizer.lr_schedule == "cosine" else 1 - done
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * remaining
