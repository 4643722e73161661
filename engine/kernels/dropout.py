"""Drops elements that are chosen by a hash of their key and position.

`engine/tensor_parallel/dropout.py` computes keys and positions.
"""

from typing import Any

import torch

from triaxis.engine.kernels.fusion import Fusion
from triaxis.engine.numerics.hashing import GOLDEN, mix_words_, shift_right
from triaxis.engine.numerics.precision import accumulation_dtype


def keyed_dropout(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    keys: torch.Tensor,
    positions: torch.Tensor,
    p: float,
    fusion: Fusion,
) -> torch.Tensor:
    """Zero x's elements with probability p, scale the rest, and add the residual if given.

    The scale is 1 / (1 - p). An element is kept if its key and position hash to at least p 2^32, so the mask is equal in every
    layout.

    Args:
        x: tensor in any float dtype.
        residual: tensor with x's shape, or None.
        keys, positions: int64 tensors, broadcastable to x.
        p: dropout probability, 0 < p < 1.
        fusion: runner for the forward.
    """
    return _KeyedDropout.apply(x, residual, keys, positions, p, fusion)


class _KeyedDropout(torch.autograd.Function):
    """Autograd function for y = x f (+ residual), where f = keep / (1 - p). It saves f in x's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        keys: torch.Tensor,
        positions: torch.Tensor,
        p: float,
        fusion: Fusion,
    ) -> torch.Tensor:
        if residual is None:
            y, factor = fusion(_dropped)(x, keys, positions, p)
        else:
            y, factor = fusion(_dropped_on)(residual, x, keys, positions, p)
        ctx.has_residual = residual is not None
        ctx.save_for_backward(factor)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None, None]:
        (factor,) = ctx.saved_tensors
        return grad * factor, grad if ctx.has_residual else None, None, None, None, None


def _dropped(
    x: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x f, f), where f is 1 / (1 - p) for kept elements and 0 for dropped ones."""
    keep = keyed_hash(keys, positions) >= int(p * 2**32)
    factor = keep.to(accumulation_dtype(x.dtype)).mul_(1.0 / (1.0 - p)).to(x.dtype)
    return x * factor, factor


def _dropped_on(
    residual: torch.Tensor, x: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (residual + x f, f), where f is 1 / (1 - p) for kept elements and 0 for dropped ones."""
    dropped, factor = _dropped(x, keys, positions, p)
    return residual + dropped, factor


def keyed_hash(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Hash each element to [0, 2^32).

    The hash is the upper half of splitmix64's mix of key + (position + 1) x golden ratio constant.
    """
    return shift_right(mix_words_(keys + (positions + 1) * GOLDEN), 32)


def sample_keys(site: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """Hash a dropout site's word [1] and sample ids [b] to one key per sample: words of splitmix64's sequence from the site on."""
    return mix_words_(site + (samples + 1) * GOLDEN)
