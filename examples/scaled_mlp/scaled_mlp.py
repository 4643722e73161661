"""The MLP of every layer, its output times a learned vector [h]."""

from collections.abc import Iterator

import torch

from triaxis import Extension, Init, ModelConfig, ParamSpec
from triaxis.models.gpt.context import BuildContext
from triaxis.models.gpt.mlp import MLP
from triaxis.models.specs import mlp_specs


class ScaledMLP(MLP):
    """Our MLP with one parameter more."""

    @staticmethod
    def specs(model: ModelConfig, layer: int) -> Iterator[ParamSpec]:
        """List the parameters by their names inside the MLP."""
        yield from mlp_specs(model, layer)
        yield ParamSpec("scale", (model.hidden_size,), Init("ones"), decay=False, grad_is_partial="sequence")

    def __init__(self, context: BuildContext, name: str) -> None:
        super().__init__(context, name)
        self.scale = context.parameter(f"{name}.scale")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x [s(/t), b, h] -> [s(/t), b, h]."""
        return super().forward(x) * self.scale.tracked()


extension = Extension(mlp=ScaledMLP)
