"""torch's AdamW with clipping, as the optimizer of an oracle."""

from collections.abc import Sequence

import torch
from torch import nn

from triaxis.engine.config.training import OptimizerConfig
from triaxis.launch.verify.verdict.records import TensorKind


class ClippedAdamW:
    """The updates of a configuration.

    Args:
        decayed, others: the trained weights, those with weight decay apart.
        config: rate, betas, eps, weight decay and clipping.
    """

    def __init__(
        self, decayed: Sequence[nn.Parameter], others: Sequence[nn.Parameter], config: OptimizerConfig
    ) -> None:
        self._weights, self._clip = [*decayed, *others], config.clip_grad or float("inf")
        self._optimizer = torch.optim.AdamW(
            [
                {"params": list(decayed), "weight_decay": config.weight_decay},
                {"params": list(others), "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
        )

    def begin_step(self) -> None:
        """Set the gradients to zero."""
        self._optimizer.zero_grad()

    def update(self) -> float:
        """Clip and update; return the norm before clipping."""
        grad_norm = nn.utils.clip_grad_norm_(self._weights, self._clip)
        self._optimizer.step()
        return float(grad_norm)

    def state(self, kind: TensorKind, weight: torch.Tensor) -> torch.Tensor:
        """Return the master or a moment of a weight."""
        return weight if kind == "master" else self._optimizer.state[weight][kind]
