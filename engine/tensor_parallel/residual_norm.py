"""The residual stream and its norms: a branch is added and the sum normalised in one function (`engine/kernels/residual_norm.py`).

The weights' gradients go to their main grads, as those of linear layers do. They are partial sums over the sequence where this rank
has a part of it; that sum follows with the other reductions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from triaxis.engine.kernels.fusion import Fusion
from triaxis.engine.kernels.residual_norm import add_and_norm, add_and_norm_backward, norm_functions
from triaxis.engine.tensor_parallel.parameter import ShardedParameter


@dataclass(frozen=True, slots=True)
class NormLayer:
    """A norm over h.

    Attributes:
        name: of the kernel.
        weights: [h] each, in the order in which the kernel takes them.
        eps: added to the variance or mean square.
        fusion: runs the functions.
    """

    name: str
    weights: Sequence[ShardedParameter]
    eps: float
    fusion: Fusion


def added_and_normalised(
    x: torch.Tensor, branch: torch.Tensor, norm: NormLayer, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y = x + factor branch, and the norm of y; all [s(/t), b, h]."""
    return _AddedAndNormalised.apply(x, branch, norm, factor)


class _AddedAndNormalised(torch.autograd.Function):
    """The sum and its norm. Saves y and the norm's statistics, as the norm alone would."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, branch: torch.Tensor, norm: NormLayer, factor: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        functions = norm_functions(norm.name, norm.fusion, is_cuda=x.is_cuda)
        weights = [weight.weight() for weight in norm.weights]
        y, normalised, *statistics = norm.fusion(add_and_norm)(functions.forward, x, branch, factor, norm.eps, *weights)
        ctx.norm, ctx.factor, ctx.functions, ctx.weights = norm, factor, functions, weights
        # Saved as an output, y would be a new view here and another one in the backward.
        ctx.save_for_backward(y.detach(), *statistics)
        return y, normalised

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        norm: NormLayer = ctx.norm
        y, *statistics = ctx.saved_tensors
        grad_x, grad_branch, *grads = norm.fusion(add_and_norm_backward)(
            ctx.functions.backward,
            y,
            grad_y,
            grad,
            ctx.factor,
            *ctx.weights,
            *statistics,
        )
        for weight, of_weight in zip(norm.weights, grads, strict=True):
            weight.add_grad(of_weight)
        return grad_x, grad_x if grad_branch is None else grad_branch, None, None
