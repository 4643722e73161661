"""An update rule that divides by the norm of the gradients that it is given: those of one run of a rank's elements."""

from collections.abc import Sequence

import torch

from triaxis import Extension
from triaxis.engine.config.schema.training import OptimizerConfig


class NormOfRun:
    moments = ("velocity",)

    @staticmethod
    def factors(optimizer: OptimizerConfig, lr: torch.Tensor, step: torch.Tensor) -> list[torch.Tensor]:
        return [lr]

    @staticmethod
    def elementwise(
        master: torch.Tensor,
        moments: Sequence[torch.Tensor],
        grad: torch.Tensor,
        factors: Sequence[torch.Tensor],
        optimizer: OptimizerConfig,
        decay: torch.Tensor,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor]]:
        (velocity,), (lr,) = moments, factors
        velocity = velocity * optimizer.momentum + grad / grad.norm() + decay * master
        return master - lr * velocity, (velocity,)


extension = Extension(update=NormOfRun)
