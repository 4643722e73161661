"""Optimizer arithmetic in two forms: torch's fused operator, and a function for one compiled pass.

`distributed.py` calls them on flat runs of owned elements. It also scales gradients, rounds masters and keeps the average.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from triaxis.engine.config.schema.training import OptimizerConfig
from triaxis.engine.config.values.optimizer_kinds import OptimizerName, StateKind

Tensors = Sequence[Tensor]
State = Mapping[StateKind, Tensors]


class Update(Protocol):
    """One optimizer's update rule, which is element-wise: any cut through the flat buffers gives the same bits.

    An extension's rule (`triaxis.engine.config.schema.extension_parts.UpdatePart`) has only `factors` and `elementwise`.
    """

    @staticmethod
    def by_torch(
        state: State, grads: Tensors, config: OptimizerConfig, lr: float, decay: float, updates: Tensor, skipped: Tensor
    ) -> None:
        """Update masters and moments in place.

        Args:
            state: tensors [n] of elements, for the master and each moment, all in the accumulation dtype.
            grads: gradients of the same elements, after loss scaling is undone and clipping applied.
            config: hyperparameters.
            lr, decay: learning rate and weight decay for these elements.
            updates: number of earlier updates; a scalar in `STEP_DTYPE`.
            skipped: a scalar in that dtype; 1 leaves everything unchanged.
        """

    @staticmethod
    def factors(config: OptimizerConfig, lr: Tensor, step: Tensor) -> list[Tensor]:
        """Compute the factors that `elementwise` reads, in float64; they change with the step.

        Args:
            config: hyperparameters.
            lr: learning rates [rules], one for each update rule.
            step: number of this update, a scalar that counts from 1.

        Returns:
            Scalars, or tensors [rules].
        """

    @staticmethod
    def elementwise(
        master: Tensor, moments: Tensors, grad: Tensor, factors: Tensors, config: OptimizerConfig, decay: Tensor
    ) -> tuple[Tensor, Tensors]:
        """Compute the new masters and moments [n]; all tensors are in the accumulation dtype.

        Factors and the weight decay are scalars, or tensors that broadcast to the elements.
        """


class AdamW:
    """AdamW (1711.05101, algorithm 2): weight decay is decoupled from the moments."""

    @staticmethod
    def by_torch(
        state: State, grads: Tensors, config: OptimizerConfig, lr: float, decay: float, updates: Tensor, skipped: Tensor
    ) -> None:
        adamw(
            list(state["master"]),
            list(grads),
            list(state["exp_avg"]),
            list(state["exp_avg_sq"]),
            [],
            # adamw increments each of these before use.
            [updates.clone() for _ in grads],
            fused=True,
            amsgrad=False,
            beta1=config.beta1,
            beta2=config.beta2,
            lr=lr,
            weight_decay=decay,
            eps=config.eps,
            maximize=False,
            found_inf=skipped,
        )

    @staticmethod
    def factors(config: OptimizerConfig, lr: Tensor, step: Tensor) -> list[Tensor]:
        """Compute [lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), lr], where t is `step`."""
        # In float64, which 1 - 0.999 needs.
        bias_1, bias_2 = 1 - torch.pow(config.beta1, step), 1 - torch.pow(config.beta2, step)
        return [lr / bias_1, bias_2.rsqrt(), lr]

    @staticmethod
    def elementwise(
        master: Tensor, moments: Tensors, grad: Tensor, factors: Tensors, config: OptimizerConfig, decay: Tensor
    ) -> tuple[Tensor, Tensors]:
        mean, square = moments
        step_size, rescale, lr = factors
        new_mean = mean + (grad - mean) * (1 - config.beta1)
        new_square = square * config.beta2 + grad * grad * (1 - config.beta2)
        decayed = master * (1 - lr * decay)
        return decayed - step_size * new_mean / (new_square.sqrt() * rescale + config.eps), (new_mean, new_square)


class SGD:
    """SGD with momentum, as in torch.optim.SGD (dampening 0, no Nesterov).

        g = gradient + weight_decay w        coupled: the decay is added to the gradient, and so enters the momentum
        v = momentum v + g                   from v = 0
        w = w - lr v

    Megatron-LM's `--optimizer sgd` uses the same class.
    """

    @staticmethod
    def by_torch(
        state: State, grads: Tensors, config: OptimizerConfig, lr: float, decay: float, updates: Tensor, skipped: Tensor
    ) -> None:
        sgd(
            list(state["master"]),
            list(grads),
            list(state["momentum_buffer"]),
            fused=True,
            found_inf=skipped,
            weight_decay=decay,
            momentum=config.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    @staticmethod
    def factors(config: OptimizerConfig, lr: Tensor, step: Tensor) -> list[Tensor]:
        """Compute the only factor, the learning rate."""
        return [lr]

    @staticmethod
    def elementwise(
        master: Tensor, moments: Tensors, grad: Tensor, factors: Tensors, config: OptimizerConfig, decay: Tensor
    ) -> tuple[Tensor, Tensors]:
        (velocity,), (lr,) = moments, factors
        new = velocity * config.momentum + (grad + decay * master)
        return master - lr * new, (new,)


UPDATES: Mapping[OptimizerName, type[Update]] = MappingProxyType({"adamw": AdamW, "sgd": SGD})
