"""Causal self-attention, cut over tp by heads.

    x [s(/t), b, h] --column--> --norms, rotation--> q [s, b, heads/t, d], k and v [s, b, kv_heads/t, d]
      --mixer--> [s, b, heads/t * d] --row--> [s(/t), b, h]

Symbols: s tokens in each of b rows, h hidden size, d head size, t = tp ranks; s(/t) is s/t with sequence parallelism, else s.

If there are fewer key/value heads than tp ranks, each rank holds one whole key/value head, which other ranks hold too. The mixer
(`engine/context_parallel/mixer.py`) computes attention.
"""

import torch
from torch import nn

from triaxis.engine.config.schema.layer_kinds import LayerKind
from triaxis.engine.kernels.masked_attention import Mask
from triaxis.engine.kernels.qkv import SplitQkv
from triaxis.engine.layout.shard_spec import cut
from triaxis.engine.linear.layers import ColumnParallelLinear
from triaxis.engine.tensor_parallel.dropout import DropoutKeys
from triaxis.models.gpt.context import BuildContext, Positions
from triaxis.models.gpt.qk_norm import NormalisedAndRotated


class Attention(nn.Module):
    """One layer's self-attention, with this tp rank's query and key/value heads."""

    def __init__(self, context: BuildContext, name: str, kind: LayerKind) -> None:
        super().__init__()
        self.context, self.name, self.kind = context, name, kind
        model, tp = context.model, context.region.axis
        (first, stop), (first_kv, stop_kv) = (
            cut(count, tp.size, tp.index) for count in (model.num_attention_heads, model.kv_heads)
        )
        self.qkv = ColumnParallelLinear(
            [context.parameter(f"{name}.q.weight"), context.parameter(f"{name}.kv.weight")],
            context.optional_parameters(f"{name}.q.bias", f"{name}.kv.bias"),
            context.region,
            context.queue,
            f"{name}.qkv",
            context.form_behind_norm(),
            consumer_sums_biases=True,
        )
        heads = stop - first, stop_kv - first_kv
        self.mixer = context.mixer(name, kind)
        # Gathered keys are copies: rotated in place, the queries alone would keep the whole product.
        copies = self.mixer.copies_rows
        split = SplitQkv(heads, model.head_size, context.kernels.fusion, self.qkv.takes_bias_total, copies=copies)
        self.rotated = NormalisedAndRotated.of(context, name, split)
        self.proj = context.row(f"{name}.proj")

    def forward(self, x: torch.Tensor, positions: Positions, keys: DropoutKeys) -> torch.Tensor:
        """Compute attention among the tokens of x [s(/t), b, h], and return [s(/t), b, h]."""
        rope = None if self.kind.rotary is None else positions.tables[self.kind.rotary]  # [2, s, b, 1, r]
        mask = Mask(self.kind.window, positions.documents, positions.part)
        qkv = self.qkv(x)  # [s, b, (heads + 2 kv_heads)/t * d]
        q, k, v = self.rotated(qkv, tables=rope)  # [s, b, heads/t, d], [s, b, kv_heads/t, d] twice
        mixed = self.mixer(q, (k, v), mask, keys if self.training else None)  # [s, b, heads/t * d]
        return self.proj(mixed)  # [s(/t), b, h]
