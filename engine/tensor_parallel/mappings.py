"""Conjugate operator pairs f and g, through which activations enter and leave the tensor-parallel region.

If sequence parallelism is off (1909.08053, figure 3), activations outside the region are whole on every rank.

    f   enter: identity          backward: all-reduce
    g   leave: all-reduce        backward: identity

If it is on (2205.05198, figure 5), activations are sharded along the sequence, dim 0 of [s, b, h].

    f'  enter: all-gather        backward: reduce-scatter
    g'  leave: reduce-scatter    backward: all-gather

The weight gradient needs the gathered input again. By default a rank saves only its own part and repeats the all-gather in the
backward (2205.05198, section 4.2.2). With `keeps_gathered` it saves the whole tensor. That costs (1 - 1/t) w b s h more bytes, for
w bytes per number and t tp ranks.

Layers call these methods from their own autograd functions: they post the collective, run the GEMM, then wait.
"""

from dataclasses import dataclass

import torch

from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.collectives import Axis


@dataclass(frozen=True, slots=True)
class TensorParallelRegion:
    """The tensor-parallel region, and how activations outside are sharded.

    A method's `purpose` labels its call in the communication ledger.

    Attributes:
        axis: the tp axis.
        sequence_parallel: whether activations outside the region are sharded along the sequence.
        keeps_gathered: whether gathered inputs are saved whole for the backward.
        cuts_entered: whether a layer's input may still be sharded along the sequence after `enter`, which then gathers nothing
            (`entered.outside_of`).
    """

    axis: Axis
    sequence_parallel: bool
    keeps_gathered: bool = False
    cuts_entered: bool = False

    @property
    def gathers(self) -> bool:
        """Whether `enter` gathers from other ranks."""
        return self.sequence_parallel and self.axis.size > 1

    def enter(self, x: torch.Tensor, purpose: str) -> Pending:
        """Post an all-gather (f') with sequence parallelism, else nothing (f): [s (/t), b, h] -> [s, b, h]."""
        return self.axis.all_gather(x, purpose) if self.sequence_parallel else Pending(x)

    def kept(self, x: torch.Tensor, entered: torch.Tensor) -> torch.Tensor:
        """Choose which tensor to save for `enter_again`, x [s (/t), b, h] or entered [s, b, h]."""
        return entered if self.keeps_gathered else x

    def enter_again(self, kept: torch.Tensor, purpose: str) -> Pending:
        """Restore [s, b, h] in the backward: post `enter` again, unless `kept` was saved whole."""
        return Pending(kept) if self.keeps_gathered else self.enter(kept, purpose)

    def enter_backward(self, grad: torch.Tensor, purpose: str) -> Pending:
        """Post the backward of `enter`, a sum over tp: [s, b, h] -> [s, b, h], or a shard [s / t, b, h]. May reduce in place."""
        if self.sequence_parallel:
            return self.axis.reduce_scatter(grad, purpose)
        return self.axis.all_reduce(grad, purpose)

    def leave(self, partial: torch.Tensor, purpose: str) -> Pending:
        """Post the sum over tp: [s, b, h] -> [s, b, h], with sequence parallelism [s / t, b, h]. May reduce `partial` in place."""
        if self.sequence_parallel:
            return self.axis.reduce_scatter(partial, purpose)
        return self.axis.all_reduce(partial, purpose)

    def leave_backward(self, grad: torch.Tensor, purpose: str) -> Pending:
        """Post the backward of `leave`, an all-gather [s / t, b, h] -> [s, b, h]; nothing without sequence parallelism."""
        return self.axis.all_gather(grad, purpose) if self.sequence_parallel else Pending(grad)

    def shard_of_sequence(self, length: int) -> slice:
        """Compute which part of a `length`-token sequence this rank holds outside the region."""
        if not self.sequence_parallel:
            return slice(0, length)
        part = length // self.axis.size
        return slice(self.axis.index * part, (self.axis.index + 1) * part)
