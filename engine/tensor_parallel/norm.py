"""Residual-stream norms, optionally fused with the addition of a branch (`engine/kernels/norms.py`).

Weight gradients go to main grads. With sequence parallelism they are partial sums over this rank's part of the sequence, which
`GradBuffers.finish` sums over tp.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from triaxis.engine.kernels.norms import NormKernel
from triaxis.engine.tensor_parallel.parameter import ShardedParameter


class Norm(nn.Module):
    """A norm over the last dim.

    Args:
        kernel: norm kernel.
        weights: weights [h], in the kernel's order.
        factor: multiplier for the branch in y = x + factor branch.
    """

    def __init__(self, kernel: NormKernel, weights: Sequence[ShardedParameter], factor: float = 1.0) -> None:
        super().__init__()
        self.kernel = kernel
        self.weights = tuple(weights)
        self.factor = factor

    def forward(
        self, x: torch.Tensor, branch: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalise x [.., h]. Given a branch, return y = x + factor branch, and y normalised."""
        if branch is None:
            return self.kernel(x, *[weight.tracked() for weight in self.weights])
        return _AddedAndNormalised.apply(x, branch, self)


class _AddedAndNormalised(torch.autograd.Function):
    """Autograd function for the sum y and its norm. It saves y and the norm's statistics."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, branch: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        weights = [weight.weight() for weight in norm.weights]
        y, normalised, *statistics = norm.kernel.add_and_norm(x, branch, norm.factor, norm.kernel.eps, *weights)
        ctx.norm, ctx.weights = norm, weights
        # Detached, because a saved output would become a new view of y here and another one in the backward.
        ctx.save_for_backward(y.detach(), *statistics)
        return y, normalised

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        norm: Norm = ctx.norm
        y, *statistics = ctx.saved_tensors
        wide = statistics[0].dtype
        grad_x, grad_branch, *grads = norm.kernel.add_and_norm_backward(
            y, grad_y, grad, norm.factor, wide, *ctx.weights, *statistics
        )
        for weight, of_weight in zip(norm.weights, grads, strict=True):
            weight.add_grad(of_weight)
        # With factor 1 the gradients of x and of the branch are one tensor.
        return grad_x, grad_x if grad_branch is None else grad_branch, None
