"""An MLP with state that no rule keeps equal: each rank adds what it sees."""

from collections.abc import Iterator

import torch

from triaxis import Extension, Init, ParamSpec
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.models.gpt.context import BuildContext
from triaxis.models.gpt.mlp import MLP
from triaxis.models.specs import mlp_specs


class Drifting(MLP):
    @staticmethod
    def specs(model: ModelConfig, layer: int) -> Iterator[ParamSpec]:
        yield from mlp_specs(model, layer)
        yield ParamSpec("scale", (model.hidden_size,), Init("ones"), decay=False, grad_is_partial="sequence")
        yield ParamSpec("sum", (1,), Init("zeros"), decay=False, is_trained=False)

    def __init__(self, context: BuildContext, name: str) -> None:
        super().__init__(context, name)
        self.scale, self.sum = context.parameter(f"{name}.scale"), context.parameter(f"{name}.sum")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) * self.scale.tracked()
        self.sum.weight().data.add_(y.detach().sum())
        return y


extension = Extension(mlp=Drifting)
