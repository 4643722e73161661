"""An extension with another kind of layer: gated linear attention, whose cost grows with s, not with its square.

A head adds up states S_t = S_{t-1} + r k_t v_t^T with its rate r, and gives sigmoid(g_t) (q_t S_t). Rows cut over cp have two runs
of tokens on a rank. A run begins with the sum of the runs before it, so the ranks gather each other's states.
"""

from collections.abc import Iterator
from typing import Any

import torch

from triaxis import Extension, Init, ParamSpec
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.config.schema.layer_kinds import LayerKind
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.tensor_parallel.dropout import DropoutKeys
from triaxis.models.gpt.attention import Attention
from triaxis.models.gpt.context import BuildContext, Positions
from triaxis.models.specs import attention_specs

CHUNK = 2
"""Tokens that are multiplied as in attention; between chunks there are states."""


class LinearAttention(Attention):
    """Gated linear attention with this tp rank's heads."""

    @staticmethod
    def specs(model: ModelConfig, layer: int) -> Iterator[ParamSpec]:
        yield from attention_specs(model, layer)
        gate = (model.num_attention_heads, model.head_size, model.hidden_size)
        yield ParamSpec("gate.weight", gate, Init("normal", model.init_std), tp_dim=0)
        yield ParamSpec("rate", (model.num_attention_heads,), Init("ones"), decay=False, tp_dim=0)

    def __init__(self, context: BuildContext, name: str, kind: LayerKind) -> None:
        super().__init__(context, name, kind)
        self.gate, self.rate = context.column(f"{name}.gate"), context.parameter(f"{name}.rate")

    def forward(self, x: torch.Tensor, positions: Positions, keys: DropoutKeys) -> torch.Tensor:
        """Mix the tokens of x [s(/t), b, h], and return [s(/t), b, h]."""
        rope = None if self.kind.rotary is None else positions.tables[self.kind.rotary]
        q, k, v = self.rotated(self.qkv(x), tables=rope)  # [s, b, heads/t, d] each
        rate = self.rate.tracked().to(torch.promote_types(x.dtype, torch.float32))
        num_runs = min(2, self.context.cp.size)
        q, k, v = (each.unflatten(0, (num_runs, -1, CHUNK)) for each in (q, (k * rate[:, None]).to(v.dtype), v))
        made = torch.einsum("rnlbad,rnlbae->rnbade", k, v)  # [runs, chunks, b, heads/t, d, d]
        before = made.cumsum(1) - made + _before_runs(self.context.cp, made.sum(1)).unsqueeze(1)
        scores = torch.einsum("rnlbad,rnmbad->rnbalm", q, k).tril()
        mixed = torch.einsum("rnbalm,rnmbad->rnlbad", scores, v) + torch.einsum("rnlbad,rnbade->rnlbae", q, before)
        mixed = mixed.flatten(0, 2).flatten(2)
        return self.proj(mixed * self.gate(x).sigmoid())


def _before_runs(cp: Axis, of_runs: torch.Tensor) -> torch.Tensor:
    """Sum the states of all runs before each of this rank's, [runs, b, heads/t, d, d] -> the same shape."""
    if cp.size == 1:
        return torch.zeros_like(of_runs)
    # Rank r holds the runs r and 2 c - 1 - r of a row.
    places = torch.tensor([[rank, 2 * cp.size - 1 - rank] for rank in range(cp.size)], device=of_runs.device)
    is_before = (places.flatten() < places[cp.index][:, None]).to(of_runs.dtype)
    return torch.einsum("rg,g...->r...", is_before, _GatheredStates.apply(of_runs, cp))


class _GatheredStates(torch.autograd.Function):
    """All ranks' states along dim 0; the backward sums their gradients over cp."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cp: Axis) -> torch.Tensor:
        ctx.cp = cp
        return cp.all_gather(x, "states").wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.cp.reduce_scatter(grad, "gradients of states").wait(), None


extension = Extension(attention=LinearAttention)
