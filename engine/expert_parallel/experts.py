"""Applies both projections of a rank's experts to token rows ordered by expert.

    rows   | expert 0 ..  | expert 1 .. |  | expert 3 ..  | unused |         ends = [e0, e1, e1, e3], cumulative
    up     inner = rows W_up[e]^T        [R, f or 2 f]
    down   out = (g act) W_down[e]^T     [R, h]

R is the number of rows, h the hidden size, f the experts' width, act the activation of inner, g the row's routing weight. Because g
multiplies the input of `down`, the gradient of g does not need the output. No result depends on unused rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from triaxis.engine.comm.backends import Pending
from triaxis.engine.kernels.fusion import Fusion
from triaxis.engine.kernels.grouped_gemm import Ends, ExpertKernel, add_grouped_products, grouped_product
from triaxis.engine.linear.weight_grads import DeferredGrad, WeightGradQueue
from triaxis.engine.tensor_parallel.parameter import ShardedParameter


@dataclass(frozen=True, slots=True)
class ExpertContext:
    """The weight-gradient queue and the kernels that a model chunk's expert projections share."""

    queue: WeightGradQueue
    fusion: Fusion
    kernel: ExpertKernel


class ExpertLinear(nn.Module):
    """One projection for all local experts, with a weight [experts, .., in]. The output dims are in the middle."""

    def __init__(self, weight: ShardedParameter, work: ExpertContext, name: str) -> None:
        super().__init__()
        self.weight = weight
        self.work = work
        self.name = name
        experts, *_, self.in_features = weight.record.local_shape
        self._shape = (experts, -1, self.in_features)

    def matrices(self) -> torch.Tensor:
        """View the weights as [experts, out, in], outside autograd."""
        return self.weight.weight().detach().view(self._shape)

    def times(self, rows: torch.Tensor, ends: Ends) -> torch.Tensor:
        """Multiply each row by its expert's weight, X W^T: rows [R, in] -> [R, out]."""
        return grouped_product(rows, self.matrices().transpose(1, 2), ends, self.work.kernel)

    def times_transposed(self, grad: torch.Tensor, ends: Ends) -> torch.Tensor:
        """Multiply each gradient row by its expert's weight, dY W: [R, out] -> [R, in]."""
        return grouped_product(grad, self.matrices(), ends, self.work.kernel)

    def weight_grad(self, rows: torch.Tensor, grad: torch.Tensor, ends: Ends) -> None:
        """Add the weight gradient to the main grad, now or with the chunk's deferred gradients."""
        queue, add_grad = self.work.queue, partial(self._add_weight_grad, ends)
        if queue.deferring:
            queue.defer(DeferredGrad(rows, Pending, grad, add_grad))
        else:
            add_grad(rows, grad)

    def _add_weight_grad(self, ends: Ends, rows: torch.Tensor, grad: torch.Tensor) -> None:
        overwrite = self.weight.overwrites()
        main_grads = self.weight.bound_main_grad().view(self._shape)
        add_grouped_products(
            main_grads,
            grad,
            rows,
            ends,
            self.work.kernel,
            overwrite=overwrite,
            weight_grad=self.work.queue.kernel,
        )
        self.weight.grad_was_added()


class ExpertUp(ExpertLinear):
    """The experts' first projection, from h to f (gated: 2 f)."""

    def forward(self, rows: torch.Tensor, ends: Ends) -> torch.Tensor:
        """Map rows [R, h] to [R, f], or to [R, 2 f] for a gated activation."""
        return _Up.apply(rows, ends, self)


class _Up(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, ends: Ends, layer: ExpertUp) -> torch.Tensor:
        ctx.layer, ctx.ends = layer, ends
        ctx.save_for_backward(rows)
        return layer.times(rows, ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        layer: ExpertUp = ctx.layer
        grad = grad.contiguous()
        grad_rows = layer.times_transposed(grad, ctx.ends)
        (rows,) = ctx.saved_tensors
        layer.weight_grad(rows, grad, ctx.ends)
        return grad_rows, None, None


class ExpertDown(ExpertLinear):
    """The experts' second projection, applied to rows times their routing weights."""

    def forward(self, activated: torch.Tensor, weights: torch.Tensor, ends: Ends) -> torch.Tensor:
        """Project activated rows [R, f], times their routing weights [R] in the accumulation dtype, to [R, h].

        `ends` says where each expert's rows end.
        """
        return _Down.apply(activated, weights, ends, self)


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, activated: torch.Tensor, weights: torch.Tensor, ends: Ends, layer: ExpertDown
    ) -> torch.Tensor:
        ctx.layer, ctx.ends = layer, ends
        ctx.save_for_backward(activated, weights)
        return layer.times(layer.work.fusion(_weighted, lengths="rows")(activated, weights), ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        activated, weights = ctx.saved_tensors
        layer: ExpertDown = ctx.layer
        fusion, grad = layer.work.fusion, grad.contiguous()
        of_weighted = layer.times_transposed(grad, ctx.ends)
        # The weighted rows are recomputed, not saved.
        layer.weight_grad(fusion(_weighted, lengths="rows")(activated, weights), grad, ctx.ends)
        backward: Callable[..., tuple[torch.Tensor, torch.Tensor]] = fusion(_weighted_backward, lengths="rows")
        return *backward(activated, weights, of_weighted), None, None


def _weighted(activated: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    # The product is computed in the weights' dtype, the wider one.
    return (activated * weights.unsqueeze(-1)).to(activated.dtype)


def _weighted_backward(
    activated: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute gradients for the activated rows [R, f] and for the weights [R].

    In eager mode, only one tensor in the weights' dtype exists at a time.
    """
    of_weights = grad.to(weights.dtype, copy=True).mul_(activated).sum(-1)
    return _weighted(grad, weights), of_weights
