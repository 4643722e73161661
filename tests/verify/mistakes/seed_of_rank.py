"""A mask of the MLP's output that each tp rank draws from a seed of its own."""

import torch

from triaxis import Extension
from triaxis.models.gpt.context import BuildContext
from triaxis.models.gpt.mlp import MLP
from triaxis.models.specs import mlp_specs


class Masked(MLP):
    specs = staticmethod(mlp_specs)

    def __init__(self, context: BuildContext, name: str) -> None:
        super().__init__(context, name)
        generator = torch.Generator().manual_seed(5 + context.region.axis.index)
        mask = torch.rand(context.model.hidden_size, generator=generator) + 0.5
        self.register_buffer("mask", mask.to(context.dtype), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.mask


extension = Extension(mlp=Masked)
