"""Applies a linear map with its transpose as backward, such as a gather whose backward is a sum over ranks."""

from collections.abc import Callable
from typing import Any

import torch

Map = Callable[[torch.Tensor], torch.Tensor]


def mapped(x: torch.Tensor, forward: Map, transposed: Map) -> torch.Tensor:
    """Compute `forward(x)` outside autograd; the backward applies `transposed` to the gradient. No tensor is saved."""
    return _Mapped.apply(x, forward, transposed)


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Map, transposed: Map) -> torch.Tensor:
        ctx.transposed = transposed
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.transposed(grad), None, None
