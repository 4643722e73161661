"""Applies RMSNorm across all query heads, and across all key heads, sharded over tp (OLMo 2, 2501.00656).

    y = x g / sqrt(S / n + eps)      S: sum of squares over a token's n query (or key) elements

One all-reduce of [s, b, 2] sums S over tp, for queries and keys together. The backward has another for the gradient. Recomputing
the other steps needs no communication. Each replica of a key head contributes 1/replicas of its squares.
"""

from typing import Any

import torch

from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import QK_NORM
from triaxis.engine.kernels.fusion import Fusion
from triaxis.engine.numerics.precision import accumulate


def squares(q: torch.Tensor, k: torch.Tensor, axis: Axis, replicas: int, fusion: Fusion) -> torch.Tensor:
    """Compute the sums of squares over all query heads and over all key heads.

    Args:
        q: this rank's queries, [s, b, heads / t, d].
        k: this rank's keys, [s, b, kv_heads / t, d], at least one head.
        axis: the tp axis.
        replicas: number of ranks that hold each key head.
        fusion: wrapper that runs the local parts.

    Returns:
        [s, b, 2] in the accumulation dtype, equal on every tp rank.
    """
    return _Squares.apply(q, k, axis, replicas, fusion)


class _Squares(torch.autograd.Function):
    """Autograd function for S_q = sum_tp sum(q^2) and S_k = sum_tp sum(k^2) / replicas. It saves q and k."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, axis: Axis, replicas: int, fusion: Fusion) -> torch.Tensor:
        ctx.axis, ctx.replicas, ctx.fusion = axis, replicas, fusion
        ctx.save_for_backward(q, k)
        return axis.all_reduce(fusion(_local_squares)(q, k, replicas), f"{QK_NORM} forward").wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        # A rank's dS comes from its own heads only, but its squares enter S on every rank.
        whole = ctx.axis.all_reduce(grad.clone(), f"{QK_NORM} backward").wait()
        grad_q, grad_k = ctx.fusion(_local_squares_backward)(*ctx.saved_tensors, whole, ctx.replicas)
        return grad_q, grad_k, None, None, None


def _local_squares(q: torch.Tensor, k: torch.Tensor, replicas: int) -> torch.Tensor:
    of_q, of_k = (accumulate(each).square().sum((-2, -1)) for each in (q, k))
    return torch.stack((of_q, of_k / replicas), dim=-1)


def _local_squares_backward(
    q: torch.Tensor, k: torch.Tensor, grad: torch.Tensor, replicas: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute dq = 2 q dS_q and dk = 2 k dS_k / replicas. `grad` holds dS_q and dS_k, for the sums of squares."""
    of_q, of_k = (part.unsqueeze(-1) for part in (2 * grad).split(1, dim=-1))
    return (q * of_q).to(q.dtype), (k * (of_k / replicas)).to(k.dtype)


def normalised(
    x: torch.Tensor, sums: torch.Tensor, weight: torch.Tensor, count: int, eps: float, offset: int, fusion: Fusion
) -> torch.Tensor:
    """Normalise heads x [s, b, heads, d] with the given sums of squares.

    Args:
        x: this rank's queries or keys.
        sums: squares summed over a token's n elements, [s, b, 1].
        weight: norm weight [heads, d].
        count: number n of elements.
        eps: constant added to the mean square.
        offset: constant added to the weight (`layer_kinds.Norm.offset`).
        fusion: wrapper that runs the forward and the backward.
    """
    return _Normalised.apply(x, sums, weight, count, eps, offset, fusion)


class _Normalised(torch.autograd.Function):
    """Autograd function for y = x r g. It saves x and S, the sum of a token's n squares on all tp ranks.

    r = 1 / sqrt(S / n + eps), and g = offset + w.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        sums: torch.Tensor,
        weight: torch.Tensor,
        count: int,
        eps: float,
        offset: int,
        fusion: Fusion,
    ) -> torch.Tensor:
        ctx.numbers, ctx.fusion = (count, eps, offset), fusion
        ctx.save_for_backward(x, sums, weight)
        return fusion(_normalise)(x, sums, weight, count, eps, offset)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None, None, None]:
        grads = ctx.fusion(_normalise_backward)(*ctx.saved_tensors, grad, *ctx.numbers)
        return (*grads, None, None, None, None)


def _root_and_gains(
    sums: torch.Tensor, weight: torch.Tensor, count: int, eps: float, offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute r = 1 / sqrt(S / n + eps) [s, b, 1, 1] and g = offset + w [heads, d]."""
    return (sums / count + eps).rsqrt().unsqueeze(-1), accumulate(weight) + offset


def _normalise(
    x: torch.Tensor, sums: torch.Tensor, weight: torch.Tensor, count: int, eps: float, offset: int
) -> torch.Tensor:
    r, gains = _root_and_gains(sums, weight, count, eps, offset)
    return (accumulate(x) * r * gains).to(x.dtype)


def _normalise_backward(
    x: torch.Tensor, sums: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, count: int, eps: float, offset: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute gradients of y = x r g, with r = 1 / sqrt(S / n + eps) and g = offset + w.

    With S for `sums`, n for `count` and dy for `grad`: dx = dy r g, dS = -r^3 / 2n sum(dy g x), dw = sum(dy x r) over tokens.
    """
    r, gains = _root_and_gains(sums, weight, count, eps, offset)
    products = accumulate(x) * grad
    grad_weight = (products * r).sum((0, 1))
    grad_sums = (products * gains).sum((-2, -1)).unsqueeze(-1) * r.squeeze(-1).pow(3) / (-2 * count)
    return (grad * r * gains).to(x.dtype), grad_sums, grad_weight.to(weight.dtype)
