"""Computes attention by Transformer Engine's DotProductAttention, which chooses FlashAttention or cuDNN.

Tensors are [s, b, heads, d], the layout of the projections. TE gets no process groups. With context parallelism, ranks exchange
tokens for heads before they call TE.
"""

from typing import Any

import torch

from triaxis.engine.kernels.te import TransformerEngine


class TeAttention:
    """TE's attention, with one TE module per (heads, kv heads, head size, window, scale).

    Args:
        te: installed Transformer Engine.
    """

    def __init__(self, te: TransformerEngine) -> None:
        self._te = te
        self._modules: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: int | None, scale: float | None
    ) -> torch.Tensor:
        """Compute causal attention: q [b, n, s, d], k and v [b, n_kv, s, d] -> [b, n, s, d].

        Args:
            q, k, v: operands with one 16-bit dtype.
            window: number of last keys that a query sees, its own included; None for all keys up to its own.
            scale: logit factor; None means d ** -0.5.
        """
        tokens_first = [each.permute(2, 0, 1, 3) for each in (q, k, v)]
        (s, b, heads, d), kv_heads = tokens_first[0].shape, k.shape[1]
        key = heads, kv_heads, d, window, scale
        if key not in self._modules:
            self._modules[key] = self._te.dot_product_attention(
                heads,
                d,
                num_gqa_groups=kv_heads,
                attention_dropout=0.0,
                qkv_format="sbhd",
                attn_mask_type="causal",
                window_size=None if window is None else (window - 1, 0),
                softmax_scale=scale,
            )
        out: torch.Tensor = self._modules[key](*tokens_first)
        return out.view(s, b, heads, d).permute(1, 2, 0, 3)
