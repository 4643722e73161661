"""The conjugate pairs of tensor parallelism, through which activations enter and leave a region that is cut over tp.

Without sequence parallelism (1909.08053, figure 3) activations outside the region are whole on every rank:

    f   enter: identity          backward: all-reduce
    g   leave: all-reduce        backward: identity

With it (2205.05198, figure 5) they are cut along the sequence, dim 0 of [s, b, h], and each all-reduce is split in its two halves:

    f'  enter: all-gather        backward: reduce-scatter
    g'  leave: reduce-scatter    backward: all-gather

The weight's gradient needs the gathered input of f' again. Either this rank keeps only its own part and gathers once more in the
backward (2205.05198, section 4.2.2), or it keeps the whole: (1 - 1/t) w b s h more bytes (w per number), one all-gather less.

The layers call these verbs from their own autograd functions, because the backward of `enter` runs under the weight-gradient GEMM:
post it, run the GEMM, wait for it.
"""

from dataclasses import dataclass

import torch

from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.collectives import Axis


@dataclass(frozen=True, slots=True)
class TensorParallelRegion:
    """The tp axis and the form of activations around the region.

    Attributes:
        axis: the tp axis.
        sequence_parallel: whether activations outside the region are cut along the sequence.
        keeps_gathered: whether gathered inputs are saved whole for the backward.
        cuts_entered: whether activations are still cut over tp after they entered.
    """

    axis: Axis
    sequence_parallel: bool
    keeps_gathered: bool = False
    cuts_entered: bool = False

    @property
    def gathers(self) -> bool:
        """Return whether `enter` gathers from other ranks."""
        return self.sequence_parallel and self.axis.size > 1

    def enter(self, x: torch.Tensor, purpose: str) -> Pending:
        """Post f or f': [s (/t), b, h] -> [s, b, h]."""
        return self.axis.all_gather(x, purpose) if self.sequence_parallel else Pending(x)

    def kept(self, x: torch.Tensor, entered: torch.Tensor) -> torch.Tensor:
        """Return the tensor to save for `enter_again`: the input x [s (/t), b, h], or the entered [s, b, h]."""
        return entered if self.keeps_gathered else x

    def enter_again(self, kept: torch.Tensor, purpose: str) -> Pending:
        """Restore [s, b, h] in the backward from the kept tensor."""
        return Pending(kept) if self.keeps_gathered else self.enter(kept, purpose)

    def enter_backward(self, grad: torch.Tensor, purpose: str) -> Pending:
        """Post the backward of f or f': partial sums [s, b, h] -> [s (/t), b, h]. May reduce `grad` in place."""
        if self.sequence_parallel:
            return self.axis.reduce_scatter(grad, purpose)
        return self.axis.all_reduce(grad, purpose)

    def leave(self, partial: torch.Tensor, purpose: str) -> Pending:
        """Post g or g': partial sums [s, b, h] -> [s (/t), b, h]. May reduce `partial` in place."""
        if self.sequence_parallel:
            return self.axis.reduce_scatter(partial, purpose)
        return self.axis.all_reduce(partial, purpose)

    def leave_backward(self, grad: torch.Tensor, purpose: str) -> Pending:
        """Post the backward of g or g': [s (/t), b, h] -> [s, b, h]."""
        return self.axis.all_gather(grad, purpose) if self.sequence_parallel else Pending(grad)

    def shard_of_sequence(self, length: int) -> slice:
        """Return the part of a sequence of `length` that this rank holds outside the region."""
        if not self.sequence_parallel:
            return slice(0, length)
        part = length // self.axis.size
        return slice(self.axis.index * part, (self.axis.index + 1) * part)
