"""Activations that enter the tensor-parallel region outside of a linear layer.

    x [s(/t), b, n] --f--> [s, b, n]        backward: the sum over tp, on this rank's part of the sequence

A column-parallel layer lets its input enter in its own function, beside its GEMMs. The latents of latent attention must be whole
earlier: context parallelism gathers them further, and decoding caches them. The layers around them use `outside_of` the region.
"""

from typing import Any

import torch

from triaxis.engine.comm.backends import Pending
from triaxis.engine.tensor_parallel.mappings import TensorParallelRegion


def entered(x: torch.Tensor, region: TensorParallelRegion, name: str) -> torch.Tensor:
    """Let x [s(/t), b, n] enter the region: [s, b, n], whole on every tp rank; `name` is its label in the ledger."""
    return _Entered.apply(x, region, name)


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: TensorParallelRegion, name: str) -> torch.Tensor:
        ctx.region, ctx.name = region, name
        whole = region.enter(x, f"{name} forward").wait()
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # An all-reduce is in place, and other nodes may hold this gradient; a reduce-scatter only reads it.
        own = grad.contiguous() if ctx.region.sequence_parallel else grad.clone(memory_format=torch.contiguous_format)
        return ctx.region.enter_backward(own, f"{ctx.name} backward").wait(), None, None


def outside_of(region: TensorParallelRegion) -> TensorParallelRegion:
    """Return the region of a layer whose input does not enter: the weight is whole on all tp ranks, or the input entered before."""
    return _Outside(region.axis, region.sequence_parallel, cuts_entered=region.sequence_parallel)


class _Outside(TensorParallelRegion):
    """The region of a layer whose input does not enter: activations stay as they are, in the forward and the backward."""

    @property
    def gathers(self) -> bool:
        return False

    def enter(self, x: torch.Tensor, purpose: str) -> Pending:
        return Pending(x)

    def enter_backward(self, grad: torch.Tensor, purpose: str) -> Pending:
        return Pending(grad)
