"""Runs a backward that starts from a given gradient, as in each pipeline stage."""

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward


def run_backward(output: torch.Tensor | GradientEdge, grad: torch.Tensor) -> None:
    """Run `torch.autograd.backward(output, grad)` without its Python checks.

    Those checks import sympy, which costs half a second and 34 MiB in each rank's first step (torch 2.13).

    Args:
        output: the forward's result, or its edge in the autograd graph.
        grad: gradient with the output's shape and dtype.

    Raises:
        RuntimeError: the gradient has another shape.
    """
    _engine_run_backward((output,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)
