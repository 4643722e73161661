"""A scale of the MLP's inner width that every rank holds whole, and of which each takes the first entries."""

from collections.abc import Iterator

import torch

from triaxis import Extension, Init, ParamSpec
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.models.gpt.context import BuildContext
from triaxis.models.gpt.mlp import MLP
from triaxis.models.specs import mlp_specs


class FirstEntries(MLP):
    @staticmethod
    def specs(model: ModelConfig, layer: int) -> Iterator[ParamSpec]:
        yield from mlp_specs(model, layer)
        yield ParamSpec("inner", (model.ffn_size,), Init("ones"), decay=False, grad_is_partial="always")

    def __init__(self, context: BuildContext, name: str) -> None:
        super().__init__(context, name)
        self.inner_scale = context.parameter(f"{name}.inner")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activated(self.up(x))
        return self.down(y * self.inner_scale.tracked()[: y.shape[-1]])


extension = Extension(mlp=FirstEntries)
