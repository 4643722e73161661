"""Recomputation of activations in the backward ("activation checkpointing"; a checkpoint is a file here).

`recompute(function, *tensors)` keeps only the tensors. The backward runs the whole function again, with all of its collectives
(torch's own utility stops the replay early and skips the last one). Random state needs no replay: dropout is a hash of sample
and position.

The function may use parameters: their gradients go to main grads, never through autograd.
"""

from collections.abc import Callable
from typing import Any

import torch

from engine.activations.backward import run_backward


def recompute(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Return `function(*tensors)`, saving only these tensors for the backward."""
    return _Recompute.apply(function, *tensors)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        ]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        run_backward(output, grad)
        return None, *(tensor.grad for tensor in inputs)
