"""Start autograd from a gradient that is at hand, as each pipeline stage does."""

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward


def run_backward(output: torch.Tensor | GradientEdge, grad: torch.Tensor) -> None:
    """`torch.autograd.backward(output, grad)`, without its checks in Python; the engine below them checks the shape again.

    Those checks import sympy, for symbolic shapes that nobody has here: half a second of a core and 34 MiB in each rank, in
    its first step (torch 2.13).

    Args:
        output: what the forward gave, or the edge of the graph that it left behind.
        grad: of its shape and dtype.

    Raises:
        RuntimeError: the gradient has another shape.
    """
    _engine_run_backward((output,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)
