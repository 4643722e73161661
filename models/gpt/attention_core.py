"""Attention of this rank's query heads to keys, and the projection back, whatever queries, keys and values are made from.

Windows, sinks, the scale and the cap of logits are those of the layer's kind and of the model.
"""

from functools import partial

import torch
from torch import nn

from triaxis.engine.config.attention_kinds import LayerKind
from triaxis.engine.config.mla import softmax_scale
from triaxis.engine.kernels.attention import attention
from triaxis.engine.kernels.explicit_attention import explicit_attention
from triaxis.engine.kernels.masked_attention import Mask
from triaxis.engine.layout.shard_spec import cut
from triaxis.engine.tensor_parallel.dropout import DropoutKeys, dropout
from triaxis.engine.tensor_parallel.layers import RowParallelLinear
from triaxis.models.gpt.context import BuildContext


class AttentionCore(nn.Module):
    """Attention of a layer's query heads to keys, and its projection back, in whatever way queries, keys and values are made."""

    def __init__(self, context: BuildContext, name: str, kind: LayerKind) -> None:
        super().__init__()
        self.kind = kind
        model, tp = context.model, context.region.axis
        self.context = context
        self.name = name
        self.first_head, stop = cut(model.num_attention_heads, tp.size, tp.index)
        self.num_heads = stop - self.first_head
        self.scale = softmax_scale(model, kind)
        self.sinks = context.optional_parameter(f"{name}.sinks")
        self.proj = RowParallelLinear(
            context.parameter(f"{name}.proj.weight"),
            context.optional_parameter(f"{name}.proj.bias"),
            context.region,
            context.queue,
            f"{name}.proj",
            context.form,
        )

    def _core(self, kernel: str, mask: Mask, keys: DropoutKeys, heads: slice, *qkv: torch.Tensor) -> torch.Tensor:
        """Compute scaled dot-product attention: q [b, n, s, d], k, v [b, n_kv, s_k, d] -> [s, b, n * d]; v may be smaller.

        s_k = s, causal; or s = 1, with the query at the last of the s_k positions; or q is this rank's part of the rows.
        The n query heads are `heads` of this tp rank's.
        """
        q, k, v = qkv
        softcap = self.context.model.attention_softcap
        sinks = None if self.sinks is None else self.sinks.tracked()[heads]
        if kernel == "explicit":
            drop = partial(self._drop, keys, heads.start)
            mixed = explicit_attention(q, k, v, mask, scale=self.scale, softcap=softcap, sinks=sinks, drop=drop)
        else:
            mixed = self._fused(kernel, mask, q, k, v, sinks)
        return mixed.permute(2, 0, 1, 3).flatten(2)

    def _fused(
        self, kernel: str, mask: Mask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Call a kernel that keeps no probabilities, with whole keys and values."""
        # A single query sees every key, and torch's causal mask would hide all but the first from it.
        causal, softcap, te = q.shape[2] > 1, self.context.model.attention_softcap, self.context.kernels.te_attention
        return attention(kernel, q, k, v, mask, is_causal=causal, scale=self.scale, softcap=softcap, sinks=sinks, te=te)

    def _drop(self, keys: DropoutKeys, first: int, probabilities: torch.Tensor) -> torch.Tensor:
        """Apply dropout to probabilities [b, n, s, s_k] while the module trains; the heads begin with this tp rank's `first`."""
        p, (_, n, s, s_k) = self.context.model.attention_dropout, probabilities.shape
        if not (p and self.training):
            return probabilities
        head, column = (torch.arange(count, device=probabilities.device) for count in (n, s_k))
        row = keys.rows(s, probabilities.device).t()[:, None, :, None]
        positions = ((self.first_head + first + head).view(-1, 1, 1) * s_k + row) * s_k + column
        fusion, site = self.context.kernels.fusion, f"{self.name}.dropout"
        return dropout(probabilities, p, keys, site, positions, batch_dim=0, fusion=fusion)
