"""Causal self-attention, cut over tp by heads.

    x [s(/t), b, h] --column--> q [s, b, heads/t, d], k and v [s, b, kv_heads/t, d] --attention--> [s, b, heads/t * d]
      --row--> [s(/t), b, h]

With fewer key/value heads than tp ranks each rank holds one whole head, as a replica. While text is generated, k and v of
earlier tokens come from a cache (`models/gpt/kv_cache.py`). Windows, sinks and rotation are those of the layer's kind.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from engine.activations.saved_tensors import ATTENTION
from engine.config.attention_kinds import LayerKind
from engine.kernels.attention import attention, masked_kernel
from engine.kernels.explicit_attention import explicit_attention
from engine.kernels.masked_attention import Mask
from engine.layout.shard_spec import cut
from engine.tensor_parallel.dropout import DropoutKeys, dropout
from engine.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from models.gpt.context import BuildContext, Positions
from models.gpt.kv_cache import LayerCache
from models.gpt.qk_norm import NormalisedAndRotated


class Attention(nn.Module):
    def __init__(self, context: BuildContext, name: str, kind: LayerKind) -> None:
        super().__init__()
        self.kind = kind
        model, tp = context.model, context.region.axis
        self.context = context
        self.name = name
        self.head_dim = model.head_size
        self.first_head, stop = cut(model.num_attention_heads, tp.size, tp.index)
        self.num_heads = stop - self.first_head
        first_kv, stop_kv = cut(model.kv_heads, tp.size, tp.index)
        self.num_kv_heads = stop_kv - first_kv
        self.qkv = ColumnParallelLinear(
            [context.parameter(f"{name}.q.weight"), context.parameter(f"{name}.kv.weight")],
            context.optional_parameters(f"{name}.q.bias", f"{name}.kv.bias"),
            context.region,
            context.queue,
            f"{name}.qkv",
        )
        self.rotated = NormalisedAndRotated(context, name)
        self.sinks = context.optional_parameter(f"{name}.sinks")
        self.proj = RowParallelLinear(
            context.parameter(f"{name}.proj.weight"),
            context.optional_parameter(f"{name}.proj.bias"),
            context.region,
            context.queue,
            f"{name}.proj",
        )

    def forward(
        self, x: torch.Tensor, positions: Positions, keys: DropoutKeys, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """Attend within x [s(/t), b, h] -> [s(/t), b, h]. With a cache, x are its next s tokens."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, k, v = self.qkv(x).split((q_size, kv_size, kv_size), dim=-1)
        s, b = q.shape[:2]
        q = q.view(s, b, self.num_heads, self.head_dim)
        k, v = (tensor.view(s, b, self.num_kv_heads, self.head_dim) for tensor in (k, v))
        saved = self.context.saved
        rope = None if self.kind.rotary is None else positions.tables[self.kind.rotary]
        q, k = self.rotated(q, k, rope)
        heads, part = slice(0, self.num_heads), positions.part
        exchange = None if part is None else self.context.exchange
        if exchange is not None:
            q, k, v = exchange.to_heads(q, k, v)
            # Rows are whole from here to the exchange back.
            heads, part, keys = exchange.mine(self.num_heads), None, replace(keys, positions=None)
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (q, k, v))
        if cache is not None:
            k, v = cache.extend(k, v)

        choices = self.context.kernels.choices
        kernel = choices.decoding if cache is not None and s == 1 else choices.attention
        mask = Mask(self.kind.window, positions.documents, part)
        core = partial(self._core, kernel, mask, keys, heads)
        if mask.part is not None and kernel != "explicit":
            # What is gathered is not saved, and nothing that communicates may run inside what is made again.
            return self.proj(core(q, k, v))
        if mask.part is not None:
            k, v = self.context.cp.gathered(k, v, mask.part)
        mixed = saved.recompute_inside(ATTENTION, core, q, k, v)
        if exchange is not None:
            mixed = exchange.to_tokens(mixed.unflatten(2, (-1, self.head_dim))).flatten(2)
        return self.proj(mixed)

    def _core(self, kernel: str, mask: Mask, keys: DropoutKeys, heads: slice, *qkv: torch.Tensor) -> torch.Tensor:
        """Compute scaled dot-product attention: q [b, n, s, d], k, v [b, n_kv, s_k, d] -> [s, b, n * d].

        s_k = s, causal; or s = 1, with the query at the last of the s_k positions; or q is this rank's part of the rows.
        The n query heads are `heads` of this tp rank's.
        """
        q, k, v = qkv
        scale, softcap = self.context.model.attention_scale, self.context.model.attention_softcap
        sinks = None if self.sinks is None else self.sinks.tracked()[heads]
        if kernel == "explicit":
            drop = partial(self._drop, keys, heads.start)
            mixed = explicit_attention(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks, drop=drop)
        elif mask.part is not None:
            by_name = masked_kernel(kernel, q.device, mask, scale, softcap)
            mixed = self.context.cp.attention(by_name, q, k, v, mask.part, sinks)
        else:
            # A single query sees every key, and torch's causal mask would hide all but the first from it.
            causal = q.shape[2] > 1
            mixed = attention(kernel, q, k, v, mask, is_causal=causal, scale=scale, softcap=softcap, sinks=sinks)
        return mixed.permute(2, 0, 1, 3).flatten(2)

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
