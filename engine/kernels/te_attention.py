"""Computes attention by Transformer Engine's DotProductAttention, which chooses FlashAttention or cuDNN.

Tensors are [s, b, heads, d], the layout of the projections. TE gets no process groups. With context parallelism, ranks exchange
tokens for heads before they call TE.
"""

from typing import Any

import torch
import torch.nn.functional as F

from triaxis.engine.kernels.te import TransformerEngine, open_te
from triaxis.engine.kernels.trial import failure

TRIED = (128, 1)
"""Tokens and samples in the trial."""


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


def te_attention_failure(
    heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> str:
    """Compare TE's attention, forward and backward, with torch's.

    Returns:
        The reason if TE's attention fails or differs, else "".
    """
    length, samples = TRIED

    def run() -> None:
        te, generator = open_te(), torch.Generator().manual_seed(1)
        numbers = [
            torch.randn(samples, n, length, head_dim, generator=generator).to(device, dtype)
            for n in (heads, kv_heads, kv_heads)
        ]
        found, wanted = (_gradients(by_te, numbers, te, window) for by_te in (True, False))
        for one, other in zip(found, wanted, strict=True):
            if not (one.double() - other.double()).norm() < 0.05 * other.double().norm():
                raise RuntimeError("its result or gradients are not those of attention")

    return failure(run)


def _gradients(
    by_te: bool, numbers: list[torch.Tensor], te: TransformerEngine, window: int | None
) -> list[torch.Tensor]:
    """Compute attention's output and the gradients for its operands, by TE or by torch."""
    q, k, v = (each.clone().requires_grad_() for each in numbers)
    # An engine that only runs forwards may be built with gradients off.
    with torch.enable_grad():
        if by_te:
            out = TeAttention(te)(q, k, v, window=window, scale=None)
        else:
            order = torch.arange(q.shape[2], device=q.device)
            distance = order[:, None] - order
            seen = (distance >= 0) & (distance < (window or len(order)))
            out = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        out.square().sum().backward()
    grads = [each.grad for each in (q, k, v) if each.grad is not None]
    return [out.detach(), *grads]
