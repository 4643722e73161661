"""The largest loss and gradient norm with which a step may update the weights."""

import math
from typing import NamedTuple


class StepLimits(NamedTuple):
    """The limits of one step, the same on every rank.

    Attributes:
        divergence: loss per token above which the loss counts as not finite (`resilience.on_nonfinite`).
        loss: loss per token above which this update alone is skipped (`resilience.skip_above_deviations`).
        grad_norm: global gradient norm, before clipping and without the loss scale, above which this update alone is skipped.
    """

    divergence: float = math.inf
    loss: float = math.inf
    grad_norm: float = math.inf


NO_LIMITS = StepLimits()
