"""Activations that enter the region of tensor parallelism by themselves, without the product of a layer.

    x [s(/t), b, n] --f--> [s, b, n]        backward: the sum over tp, on this rank's part of the sequence

Column-parallel layers enter within their own function, beside their GEMMs. The latents of latent attention are needed before one:
context parallelism gathers them further, and what is generated is cached from them. Around them are layers that nothing enters.
"""

from typing import Any

import torch

from triaxis.engine.comm.backends import Pending
from triaxis.engine.tensor_parallel.mappings import TensorParallelRegion


def entered(x: torch.Tensor, region: TensorParallelRegion, name: str) -> torch.Tensor:
    """Return x [s(/t), b, n] as every tp rank has it whole, [s, b, n]; `name` is for the ledger."""
    return _Entered.apply(x, region, name)


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: TensorParallelRegion, name: str) -> torch.Tensor:
        ctx.region, ctx.name = region, name
        whole = region.enter(x, f"{name} forward").wait()
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # A reduction may be in place, and others may hold this gradient.
        own = grad.contiguous() if ctx.region.sequence_parallel else grad.clone(memory_format=torch.contiguous_format)
        return ctx.region.enter_backward(own, f"{ctx.name} backward").wait(), None, None


def outside_of(region: TensorParallelRegion) -> TensorParallelRegion:
    """Return the form of a layer that nothing enters: its weight is whole on all tp ranks, or its input has entered before."""
    return _Outside(region.axis, region.sequence_parallel, cuts_entered=region.sequence_parallel)


class _Outside(TensorParallelRegion):
    """Activations stay as they are, in the forward and the backward."""

    @property
    def gathers(self) -> bool:
        return False

    def enter(self, x: torch.Tensor, purpose: str) -> Pending:
        return Pending(x)

    def enter_backward(self, grad: torch.Tensor, purpose: str) -> Pending:
        return Pending(grad)
