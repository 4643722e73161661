"""DeepSpeed's learning rates, and where ours differ.

A warm-up over W steps to the learning rate lr, and a decay to the floor at step T, have these rates:

steps done before s   0    1 .. W                      after the warm-up
DeepSpeed's linear    0    (s - 1) / W lr              as ours, one step later
DeepSpeed's cosine    0    (s - 1) / W lr              as ours
ours                  (s + 1) / W lr, at most lr       from lr at W to the floor at T
"""

import math
from typing import Literal, NamedTuple

from triaxis.engine.config.schema.training import OptimizerConfig
from triaxis.engine.optimizer.lr import learning_rate
from triaxis.models.interop.rate_notes import differing_rates

Decay = Literal["constant", "linear", "cosine"]


class DeepSpeedRates(NamedTuple):
    """The rates of WarmupLR, WarmupDecayLR and WarmupCosineLR in DeepSpeed 0.19.

    Attributes:
        kind: our name of the decay: `constant`, `linear` or `cosine`.
        lr: peak.
        low: rate at which the warm-up begins; for `cosine`, a share of lr.
        floor: rate at the end of the decay.
        warmup, total: `warmup_num_steps`, at least 2, and `total_num_steps`, 0 without a decay.
        is_log: the warm-up follows the logarithm of the step.
    """

    kind: Decay
    lr: float
    low: float
    floor: float
    warmup: int
    total: int
    is_log: bool

    def rate(self, steps: int) -> float:
        """Compute the rate of the step that starts after `steps` steps. The first two steps have the same rate."""
        start = self.low * self.lr if self.kind == "cosine" else self.low
        done = max(0, steps - 1)
        if done < self.warmup:
            share = math.log(done + 1) / math.log(self.warmup) if self.is_log else done / self.warmup
            return start + (self.lr - start) * share
        length = max(1, self.total - self.warmup)
        if self.kind == "linear":
            return self.floor + (self.lr - self.floor) * max(0.0, (self.total - done) / length)
        if self.kind == "cosine":
            progress = min(1.0, (done - self.warmup + 1) / length)
            return self.floor + (self.lr - self.floor) * (1 + math.cos(math.pi * progress)) / 2
        return self.lr


def rate_notes(there: DeepSpeedRates) -> list[str]:
    """Note where our learning rates differ from DeepSpeed's (`there`) with equal warm-up, decay and floor."""
    num_steps = there.total or there.warmup + 2
    ours = OptimizerConfig.model_construct(
        lr=there.lr,
        min_lr=there.floor,
        lr_schedule=there.kind,
        warmup_steps=there.warmup,
        decay_steps=there.total or None,
    )
    ends = (0, there.warmup, there.total)
    return differing_rates(
        there.rate, lambda step: learning_rate(step, 1, ours, num_steps), ends, num_steps, there.lr, "DeepSpeed"
    )
