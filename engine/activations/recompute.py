"""Recomputes activations in the backward, which others call "activation checkpointing".

`recompute(function, *tensors)` keeps only the tensors. The backward runs the whole function again, with all its collectives. Random
state needs no replay, because dropout is a hash of sample and position.

The function may use parameters. Their gradients go to main grads, never through autograd.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from triaxis.engine.activations.backward import run_backward


def recompute(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Compute `function(*tensors)`, saving only these tensors for the backward."""
    return _Recompute.apply(function, *tensors)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # New leaves: the replay's backward ends at them, and this node returns their gradients.
        inputs = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        ]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        run_backward(output, grad)
        return None, *(tensor.grad for tensor in inputs)


def watch_replay(node: Node, watch: Callable[[Sequence[torch.Tensor], torch.Tensor], None]) -> None:
    """Call `watch(inputs, output)` when the backward replays the node's function.

    The replay records the autograd graph of `output`, which the forward did not record. Nodes that `recompute` did not create are
    ignored.
    """
    # The type's name, not `node.name()`: a function that sets `ctx.name` hides the method.
    if type(node).__name__ != f"{_Recompute.__name__}Backward":
        return
    recomputed: Any = node
    function = recomputed.function

    def watched(*inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = function(*inputs)
        watch(inputs, output)
        return output

    recomputed.function = watched
