"""An extension of every part: what people change in a layer, and a loss."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from triaxis.engine.config.schema.extension_parts import Extension
from triaxis.engine.config.schema.layer_kinds import LayerKind
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.head.vocabulary import VocabularyLogits
from triaxis.engine.kernels.masked_attention import Mask
from triaxis.engine.layout.shard_spec import Init, ParamSpec
from triaxis.engine.tensor_parallel.dropout import DropoutKeys
from triaxis.models.gpt.attention import Attention
from triaxis.models.gpt.context import BuildContext, Positions
from triaxis.models.gpt.mlp import MLP
from triaxis.models.gpt.own_loss import LogitLosses
from triaxis.models.specs import attention_specs, mlp_specs


class Centred(nn.Module):
    """A norm with a bias alone."""

    @staticmethod
    def specs(model: ModelConfig) -> Iterator[ParamSpec]:
        yield ParamSpec("bias", (model.hidden_size,), Init("zeros"), decay=False, grad_is_partial="sequence")

    def __init__(self, context: BuildContext, name: str) -> None:
        super().__init__()
        self.bias = context.parameter(f"{name}.bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-2) + self.bias.tracked()


class Tempered(Attention):
    """A temperature for each head, cut over tp as the heads are."""

    @staticmethod
    def specs(model: ModelConfig, layer: int) -> Iterator[ParamSpec]:
        yield from attention_specs(model, layer)
        yield ParamSpec("temperature", (model.num_attention_heads,), Init("ones"), decay=False, tp_dim=0)

    def __init__(self, context: BuildContext, name: str, kind: LayerKind) -> None:
        super().__init__(context, name, kind)
        self.temperature = context.parameter(f"{name}.temperature")

    def forward(self, x: torch.Tensor, positions: Positions, keys: DropoutKeys) -> torch.Tensor:
        rope = None if self.kind.rotary is None else positions.tables[self.kind.rotary]
        mask = Mask(self.kind.window, positions.documents, positions.part)
        q, k, v = self.rotated(self.qkv(x), tables=rope)
        mixed = self.mixer(q * self.temperature.tracked()[:, None], (k, v), mask, keys if self.training else None)
        return self.proj(mixed)


class Scaled(MLP):
    """A scale of the inner width, cut over tp, and one of the output."""

    @staticmethod
    def specs(model: ModelConfig, layer: int) -> Iterator[ParamSpec]:
        yield from mlp_specs(model, layer)
        yield ParamSpec("inner_scale", (model.ffn_size,), Init("ones"), decay=False, tp_dim=0)
        yield ParamSpec("scale", (model.hidden_size,), Init("ones"), decay=False, grad_is_partial="sequence")

    def __init__(self, context: BuildContext, name: str) -> None:
        super().__init__(context, name)
        self.inner_scale = context.parameter(f"{name}.inner_scale")
        self.scale = context.parameter(f"{name}.scale")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activated = self.activated(self.up(x)) * self.inner_scale.tracked()
        return self.down(activated) * self.scale.tracked()


class Smoothed(LogitLosses):
    """Label smoothing, the distance of the label's logit to the largest, and a weight of odd labels."""

    def of_logits(self, logits: VocabularyLogits, labels: torch.Tensor) -> torch.Tensor:
        mean = logits.sum(logits.columns) / logits.vocab_size
        far = (logits.max() - logits.at(labels)).square()
        return logits.log_sum_exp() - 0.9 * logits.at(labels) - 0.1 * mean + 0.01 * far

    @staticmethod
    def weights(tokens: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        return torch.where(labels % 2 == 1, 0.003, 0.001) * counted


def plain_smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute `Smoothed` from whole logits [s, b, V]."""
    logs = logits.log_softmax(-1)
    at = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    far = (logits.detach().amax(-1) - at).square()
    of_label = logs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return -0.9 * of_label - 0.1 * logs.mean(-1) + 0.01 * far


extension: Any = Extension(norm=Centred, attention=Tempered, mlp=Scaled, loss=Smoothed)
