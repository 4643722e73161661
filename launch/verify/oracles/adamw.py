"""Provide a base class for oracles that torch's AdamW updates."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from triaxis.engine.config.schema.training import OptimizerConfig
from triaxis.launch.verify.verdict.records import TensorKind


class UpdatedByTorch:
    """Base class for a `model.Oracle` that torch's AdamW updates.

    Subclasses compute losses.

    Args:
        named: all weights, by the oracle's names.
        decayed, others: trained weights with decay, and trained weights without.
        config: settings for learning rate, betas, eps, weight decay and clipping.
    """

    def __init__(
        self,
        named: Mapping[str, torch.Tensor],
        decayed: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        config: OptimizerConfig,
    ) -> None:
        self._named = named
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

    def parameter(self, name: str) -> torch.Tensor:
        return self._named[name]

    def begin_step(self) -> None:
        self._optimizer.zero_grad()

    def gradient(self, name: str) -> torch.Tensor:
        gradient = self._named[name].grad
        assert gradient is not None, f"{name} had no part in the loss"
        return gradient

    def update(self) -> float:
        """Clip the gradients, update the weights, and return the norm before clipping."""
        grad_norm = nn.utils.clip_grad_norm_(self._weights, self._clip)
        self._optimizer.step()
        return float(grad_norm)

    def state(self, kind: TensorKind, name: str) -> torch.Tensor:
        """Return the weight for kind `master`, else AdamW's state with that kind's name."""
        weight = self._named[name]
        return weight if kind == "master" else self._optimizer.state[weight][kind]
