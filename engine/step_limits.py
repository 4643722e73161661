"""Limits on the loss and gradient norm, above which a step must not update the weights."""

import math
from typing import NamedTuple


class StepLimits(NamedTuple):
    """Limits for one step, the same on every rank.

    Attributes:
        divergence: loss per token above which the loss counts as not finite (`resilience.on_nonfinite`).
        loss: loss per token above which this update alone is skipped (`resilience.skip_above_deviations`).
        grad_norm: global gradient norm, before clipping and without the loss scale, above which this update alone is skipped.
    """

    divergence: float = math.inf
    loss: float = math.inf
    grad_norm: float = math.inf


NO_LIMITS = StepLimits()
