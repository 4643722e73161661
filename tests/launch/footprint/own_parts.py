"""Parts that cost more, and other things, than ours: a wider MLP with a gate, heads with a temperature; an MLP without tp."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from triaxis import Extension, Init, ParamSpec
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.models.gpt.attention import Attention
from triaxis.models.gpt.context import BuildContext
from triaxis.models.specs import attention_specs


class Wide(nn.Module):
    @staticmethod
    def specs(model: ModelConfig, layer: int) -> Iterator[ParamSpec]:
        h, f, normal = model.hidden_size, 5 * model.hidden_size, Init("normal", model.init_std)
        yield ParamSpec("up.weight", (f, h), normal, tp_dim=0)
        yield ParamSpec("gate.weight", (f, h), normal, tp_dim=0, fused_with_previous=True)
        yield ParamSpec("down.weight", (h, f), normal, tp_dim=1)

    def __init__(self, context: BuildContext, name: str) -> None:
        super().__init__()
        self.both, self.down = context.column(f"{name}.up", f"{name}.gate"), context.row(f"{name}.down")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.both(x).chunk(2, dim=-1)
        y: torch.Tensor = self.down(up.relu().square() * gate.sigmoid())
        return y


class Tempered(Attention):
    @staticmethod
    def specs(model: ModelConfig, layer: int) -> Iterator[ParamSpec]:
        yield from attention_specs(model, layer)
        yield ParamSpec("temperature", (model.num_attention_heads,), Init("ones"), decay=False, tp_dim=0)

    def __init__(self, context: BuildContext, name: str, kind: Any) -> None:
        super().__init__(context, name, kind)
        self.temperature = context.parameter(f"{name}.temperature")

    def forward(self, x: torch.Tensor, positions: Any, keys: Any) -> torch.Tensor:
        return super().forward(x, positions, keys) * self.temperature.tracked().mean()


class Whole(nn.Module):
    """One matrix that every rank has whole."""

    @staticmethod
    def specs(model: ModelConfig, layer: int) -> Iterator[ParamSpec]:
        h, normal = model.hidden_size, Init("normal", model.init_std)
        yield ParamSpec("weight", (h, h), normal, grad_is_partial="sequence")

    def __init__(self, context: BuildContext, name: str) -> None:
        super().__init__()
        self.weight = context.parameter(f"{name}.weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight.tracked())


class OfData(Whole):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(x.abs().max())


extension = Extension(mlp=Wide, attention=Tempered)
