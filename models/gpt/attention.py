"""Causal self-attention, cut over tp by heads.

    x [s(/t), b, h] --column--> q [s, b, heads/t, d], k and v [s, b, kv_heads/t, d] --attention--> [s, b, heads/t * d]
      --row--> [s(/t), b, h]

With fewer key/value heads than tp ranks each rank holds one whole head, as a replica. While text is generated, k and v of
earlier tokens come from a cache (`models/gpt/kv_cache.py`). Windows, sinks and rotation are those of the layer's kind.
"""

from dataclasses import replace
from functools import partial

import torch

from triaxis.engine.activations.saved_tensors import ATTENTION
from triaxis.engine.config.attention_kinds import LayerKind
from triaxis.engine.kernels.attention import masked_kernel
from triaxis.engine.kernels.masked_attention import Mask
from triaxis.engine.kernels.qkv import split_qkv
from triaxis.engine.layout.shard_spec import cut
from triaxis.engine.tensor_parallel.dropout import DropoutKeys
from triaxis.engine.tensor_parallel.layers import ColumnParallelLinear
from triaxis.models.gpt.attention_core import AttentionCore
from triaxis.models.gpt.context import BuildContext, Positions
from triaxis.models.gpt.kv_cache import LayerCache
from triaxis.models.gpt.qk_norm import NormalisedAndRotated


class Attention(AttentionCore):
    """Attention whose queries, keys and values are projected from x, with as many or fewer key/value heads."""

    def __init__(self, context: BuildContext, name: str, kind: LayerKind) -> None:
        super().__init__(context, name, kind)
        model, tp = context.model, context.region.axis
        self.head_dim = model.head_size
        first_kv, stop_kv = cut(model.kv_heads, tp.size, tp.index)
        self.num_kv_heads = stop_kv - first_kv
        self.qkv = ColumnParallelLinear(
            [context.parameter(f"{name}.q.weight"), context.parameter(f"{name}.kv.weight")],
            context.optional_parameters(f"{name}.q.bias", f"{name}.kv.bias"),
            context.region,
            context.queue,
            f"{name}.qkv",
            context.form_behind_norm(),
            consumer_sums_biases=True,
        )
        self.rotated = NormalisedAndRotated(context, name)

    def new_cache(self, places: int, device: torch.device) -> LayerCache:
        """Build an empty cache for one sequence of at most `places` tokens."""
        return LayerCache((1, self.num_kv_heads, places, self.head_dim), self.context.dtype, device)

    def forward(
        self, x: torch.Tensor, positions: Positions, keys: DropoutKeys, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """Attend within x [s(/t), b, h] -> [s(/t), b, h]. With a cache, x are its next s tokens."""
        rope = None if self.kind.rotary is None else positions.tables[self.kind.rotary]
        in_split = rope if self.rotated.is_rotation else None
        fusion, take_total = self.context.kernels.fusion, self.qkv.takes_bias_total
        q, k, v = split_qkv(
            self.qkv(x), (self.num_heads, self.num_kv_heads), self.head_dim, in_split, fusion, take_total
        )
        if not self.rotated.is_rotation:
            q, k = self.rotated(q, k, rope)
        s, saved = q.shape[0], self.context.saved
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

    def _fused(
        self, kernel: str, mask: Mask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Call a kernel; where q is a part of the rows, k and v are too, and are gathered."""
        if mask.part is None:
            return super()._fused(kernel, mask, q, k, v, sinks)
        by_name = masked_kernel(kernel, q.device, mask, self.scale, self.context.model.attention_softcap)
        return self.context.cp.attention(by_name, q, k, v, mask.part, sinks)
