"""Brings activations into the tensor-parallel region separately from any linear layer.

    x [s(/t), b, n] --f--> [s, b, n]        backward: sum over tp, on this rank's tokens

In the region, each rank has all tokens. Latent attention (MLA) needs all tokens' latents before its linear layers, for
context parallelism and decoding. `entered` gathers the latents. So layers that produce or read latents must not gather on entry:
they use `outside_of(region)`.
"""

from typing import Any

import torch

from triaxis.engine.comm.backends import Pending
from triaxis.engine.tensor_parallel.mappings import TensorParallelRegion


def entered(x: torch.Tensor, region: TensorParallelRegion, name: str) -> torch.Tensor:
    """Bring x [s(/t), b, n] into the region as [s, b, n], whole on every tp rank. `name` labels the calls in the ledger."""
    return _Entered.apply(x, region, name)


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: TensorParallelRegion, name: str) -> torch.Tensor:
        ctx.region, ctx.name = region, name
        whole = region.enter(x, f"{name} forward").wait()
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # An all-reduce works in place, and other nodes may hold this gradient, so it gets a copy; a reduce-scatter only reads.
        own = grad.contiguous() if ctx.region.sequence_parallel else grad.clone(memory_format=torch.contiguous_format)
        return ctx.region.enter_backward(own, f"{ctx.name} backward").wait(), None, None


def outside_of(region: TensorParallelRegion) -> TensorParallelRegion:
    """Derive the region for a layer that communicates nothing on entry.

    Use it if every tp rank holds the layer's whole weight, or if `entered` has already brought the layer's input into the region.
    """
    return _Outside(region.axis, region.sequence_parallel, cuts_entered=region.sequence_parallel)


class _Outside(TensorParallelRegion):
    """Region that leaves activations unchanged in the forward and the backward."""

    @property
    def gathers(self) -> bool:
        return False

    def enter(self, x: torch.Tensor, purpose: str) -> Pending:
        return Pending(x)

    def enter_backward(self, grad: torch.Tensor, purpose: str) -> Pending:
        return Pending(grad)
