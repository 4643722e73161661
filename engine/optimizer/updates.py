"""The arithmetic of each optimizer, in two forms: torch's fused operator, and a function for one compiled pass.

`distributed.py` calls them on flat runs of owned elements; whatever is the same for all optimizers is there.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from engine.config.optimizer_kinds import OptimizerName, StateKind
from engine.config.training import OptimizerConfig


class Update(Protocol):
    """The update rule of one optimizer. Elements are updated one by one, so any cut of the flat buffers gives the same."""

    @staticmethod
    def by_torch(
        state: Mapping[StateKind, Sequence[torch.Tensor]],
        grads: Sequence[torch.Tensor],
        config: OptimizerConfig,
        lr: float,
        weight_decay: float,
        num_updates: torch.Tensor,
        skipped: torch.Tensor,
    ) -> None:
        """Update masters and moments in place.

        Args:
            state: by kind, runs of elements [n], all in the accumulation dtype.
            grads: of the same runs, scaled.
            config: hyperparameters.
            lr, weight_decay: of these runs in this step.
            num_updates: made before this one; a scalar in `STEP_DTYPE`.
            skipped: a scalar of the same dtype: 1 leaves everything as it is.
        """

    @staticmethod
    def factors(config: OptimizerConfig, lr: float, step: torch.Tensor) -> list[torch.Tensor]:
        """Return the scalars of `elementwise` that differ by step. `step` counts from 1 and has their dtype, float64."""

    @staticmethod
    def elementwise(
        master: torch.Tensor,
        moments: Sequence[torch.Tensor],
        grad: torch.Tensor,
        factors: Sequence[torch.Tensor],
        config: OptimizerConfig,
        weight_decay: float,
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return the new masters and moments [n]; all tensors are in the accumulation dtype, the moments in their order."""


class AdamW:
    """AdamW (1711.05101, algorithm 2): weight decay is decoupled from the moments."""

    @staticmethod
    def by_torch(
        state: Mapping[StateKind, Sequence[torch.Tensor]],
        grads: Sequence[torch.Tensor],
        config: OptimizerConfig,
        lr: float,
        weight_decay: float,
        num_updates: torch.Tensor,
        skipped: torch.Tensor,
    ) -> None:
        adamw(
            list(state["master"]),
            list(grads),
            list(state["exp_avg"]),
            list(state["exp_avg_sq"]),
            [],
            # adamw adds one to each of these before it uses them.
            [num_updates.clone() for _ in grads],
            fused=True,
            amsgrad=False,
            beta1=config.beta1,
            beta2=config.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=config.eps,
            maximize=False,
            found_inf=skipped,
        )

    @staticmethod
    def factors(config: OptimizerConfig, lr: float, step: torch.Tensor) -> list[torch.Tensor]:
        """Return [lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), lr]."""
        # 1 - 0.999 needs float64.
        bias_1, bias_2 = 1 - torch.pow(config.beta1, step), 1 - torch.pow(config.beta2, step)
        return [lr / bias_1, bias_2.rsqrt(), torch.full_like(step, lr)]

    @staticmethod
    def elementwise(
        master: torch.Tensor,
        moments: Sequence[torch.Tensor],
        grad: torch.Tensor,
        factors: Sequence[torch.Tensor],
        config: OptimizerConfig,
        weight_decay: float,
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        mean, square = moments
        step_size, rescale, lr = factors
        new_mean = mean + (grad - mean) * (1 - config.beta1)
        new_square = square * config.beta2 + grad * grad * (1 - config.beta2)
        decayed = master * (1 - lr * weight_decay)
        return decayed - step_size * new_mean / (new_square.sqrt() * rescale + config.eps), (new_mean, new_square)


class SGD:
    """SGD with momentum as torch.optim.SGD has it (dampening 0, no Nesterov).

        g = gradient + weight_decay w        coupled: the decay is part of the gradient, and so of the momentum
        v = momentum v + g                   from v = 0
        w = w - lr v

    Megatron-LM's `--optimizer sgd` is the same class.
    """

    @staticmethod
    def by_torch(
        state: Mapping[StateKind, Sequence[torch.Tensor]],
        grads: Sequence[torch.Tensor],
        config: OptimizerConfig,
        lr: float,
        weight_decay: float,
        num_updates: torch.Tensor,
        skipped: torch.Tensor,
    ) -> None:
        sgd(
            list(state["master"]),
            list(grads),
            list(state["momentum_buffer"]),
            fused=True,
            found_inf=skipped,
            weight_decay=weight_decay,
            momentum=config.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    @staticmethod
    def factors(config: OptimizerConfig, lr: float, step: torch.Tensor) -> list[torch.Tensor]:
        """Return [lr]."""
        return [torch.full_like(step, lr)]

    @staticmethod
    def elementwise(
        master: torch.Tensor,
        moments: Sequence[torch.Tensor],
        grad: torch.Tensor,
        factors: Sequence[torch.Tensor],
        config: OptimizerConfig,
        weight_decay: float,
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        (velocity,), (lr,) = moments, factors
        new = velocity * config.momentum + (grad + weight_decay * master)
        return master - lr * new, (new,)


UPDATES: Mapping[OptimizerName, type[Update]] = MappingProxyType({"adamw": AdamW, "sgd": SGD})
