"""The loss scale: a factor in the backward that keeps small fp16 gradients from becoming zero (1710.03740).

    backward     d loss x scale / the loss's divisor     on the last stage and in routers; gradients come out x scale.
    overflow     the squared gradient norm is not finite while the loss is, and the scale is above its minimum
                 -> no update in this step. The first `hysteresis` - 1 overflows leave the scale; later ones halve it.
                 A doubling restarts the count.
    update       gradients / scale; after `window` updates in a row the scale doubles.
    diverged     nothing changes: a smaller scale would not help.

The rule matches Megatron-LM's DynamicGradScaler and DeepSpeed's DynamicLossScaler; with hysteresis 1 it matches torch's GradScaler.
It reads only the agreed sum of squares, so all ranks have the same scale without an extra collective, and the host reads nothing. A
power of two changes no bits in gradients that stay in range.
"""

from typing import NamedTuple

import torch

from triaxis.engine.config.schema.loss_scale import LossScaleConfig
from triaxis.engine.numerics.precision import AGREEMENT_DTYPE

FACTOR = 2.0


class ScaleState(NamedTuple):
    """A dynamic scale's state, on the host.

    Attributes:
        scale: scale for the next step.
        updates: number of updates since the last overflow or doubling.
        hysteresis: number of overflows until the scale halves, counting the one that halves it. It stays 0 after a halving: each
            overflow then halves the scale, until a doubling restarts the count.
    """

    scale: float
    updates: int
    hysteresis: int


class LossScale:
    """A run's loss scale, the same on every rank.

    Args:
        config: scale settings; None if the dtype needs no scale, which is then a static 1.

    Attributes:
        scale: scale for the next backward, a scalar on the device in `AGREEMENT_DTYPE`.
        is_reported: whether the dtype needs a scale.
    """

    def __init__(self, config: LossScaleConfig | None, device: torch.device) -> None:
        self.is_reported = config is not None
        config = LossScaleConfig(static=1.0) if config is None else config
        self._config = config
        self.is_dynamic = config.static is None
        first = config.initial if config.static is None else config.static
        self.scale = torch.full((), first, dtype=AGREEMENT_DTYPE, device=device)
        self._updates = torch.zeros((), dtype=AGREEMENT_DTYPE, device=device)
        self._hysteresis = torch.full((), float(config.hysteresis), dtype=AGREEMENT_DTYPE, device=device)

    def can_fall(self) -> torch.Tensor:
        """Test whether the scale is above its minimum, as a bool on the device; a static scale never is."""
        return self.scale > (self._config.minimum if self.is_dynamic else torch.inf)

    def update(self, overflowed: torch.Tensor, skipped: torch.Tensor) -> None:
        """Update the scale after a step. `overflowed` and `skipped` (for whatever reason) are bools on the device."""
        if not self.is_dynamic:
            return
        config, overflows = self._config, overflowed.to(AGREEMENT_DTYPE)
        # An overflow restarts the count of updates; a step skipped for another reason leaves it.
        updates = torch.where(overflowed, 0.0, (self._updates + 1).where(~skipped, self._updates))
        doubles = updates >= config.window
        hysteresis = torch.where(doubles, float(config.hysteresis), (self._hysteresis - overflows).clamp(min=0.0))
        lower = torch.where(overflowed & (hysteresis == 0), (self.scale / FACTOR).clamp(min=config.minimum), self.scale)
        self.scale = torch.where(doubles, self.scale * FACTOR, lower)
        self._updates, self._hysteresis = updates.masked_fill(doubles, 0.0), hysteresis

    def state(self) -> ScaleState | None:
        """Read the state; None if the scale is static. On a GPU the host waits."""
        if not self.is_dynamic:
            return None
        return ScaleState(float(self.scale), int(self._updates), int(self._hysteresis))

    def restore(self, state: ScaleState | None) -> None:
        """Restore a state, clamped to this run's bounds; None: start anew."""
        config = self._config
        if not self.is_dynamic:
            return
        scale, updates, hysteresis = state or ScaleState(config.initial, 0, config.hysteresis)
        self.scale.fill_(max(scale, config.minimum))
        self._updates.fill_(min(updates, config.window - 1))
        self._hysteresis.fill_(min(hysteresis, config.hysteresis))
