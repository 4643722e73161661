"""The conjugate pairs of tensor parallelism: how activations enter and leave a region that is cut over tp.

Without sequence parallelism (1909.08053, figure 3) activations outside the region are whole on every rank:

    f   enter: identity          backward: all-reduce
    g   leave: all-reduce        backward: identity

With it (2205.05198, figure 5) they are cut along the sequence, dim 0 of [s, b, h], and each all-reduce becomes its halves:

    f'  enter: all-gather        backward: reduce-scatter
    g'  leave: reduce-scatter    backward: all-gather

The layers call these verbs from their own autograd functions, because the backward of `enter` is overlapped with the
weight-gradient GEMM: it is posted, the GEMM runs, then it is waited for.
"""

from dataclasses import dataclass

import torch

from engine.collectives import Axis, Pending


@dataclass(frozen=True, slots=True)
class TensorParallelRegion:
    """The tp axis, and whether activations outside the region are cut along the sequence."""

    axis: Axis
    sequence_parallel: bool

    def enter(self, x: torch.Tensor, purpose: str) -> Pending:
        """f or f': [s (/t), b, h] -> [s, b, h]."""
        return self.axis.all_gather(x, purpose) if self.sequence_parallel else Pending(x)

    def enter_backward(self, grad: torch.Tensor, purpose: str) -> Pending:
        """Backward of f or f': partial sums [s, b, h] -> [s (/t), b, h]. May reduce `grad` in place."""
        if self.sequence_parallel:
            return self.axis.reduce_scatter(grad, purpose)
        return self.axis.all_reduce(grad, purpose)

    def leave(self, partial: torch.Tensor, purpose: str) -> Pending:
        """g or g': partial sums [s, b, h] -> [s (/t), b, h]. May reduce `partial` in place."""
        if self.sequence_parallel:
            return self.axis.reduce_scatter(partial, purpose)
        return self.axis.all_reduce(partial, purpose)

    def leave_backward(self, grad: torch.Tensor, purpose: str) -> Pending:
        """Backward of g or g': [s (/t), b, h] -> [s, b, h]."""
        return self.axis.all_gather(grad, purpose) if self.sequence_parallel else Pending(grad)

    def shard_of_sequence(self, length: int) -> slice:
        """The part of a sequence of `length` that this rank holds outside the region."""
        if not self.sequence_parallel:
            return slice(0, length)
        part = length // self.axis.size
        return slice(self.axis.index * part, (self.axis.index + 1) * part)
