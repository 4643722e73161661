"""Weight-gradient GEMMs, at once or later: zero-bubble schedules compute them apart from the gradient of the input."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from triaxis.engine.activations.saved_tensors import TensorObserver, unobserved
from triaxis.engine.comm.backends import Pending
from triaxis.engine.kernels.weight_grad import WeightGradKernel


@dataclass(frozen=True, slots=True)
class DeferredGrad:
    """The weight gradient of one layer and microbatch, still to be computed.

    Attributes:
        part: an operand as this rank keeps it; with sequence parallelism its shard [s/t, b, h].
        gather: posts what makes it whole, [s, b, h].
        other: the other operand, whole.
        add: computes the gradient from the whole operand and the other one.
    """

    part: torch.Tensor
    gather: Callable[[torch.Tensor], Pending]
    other: torch.Tensor
    add: Callable[[torch.Tensor, torch.Tensor], None]


class WeightGradQueue:
    """Weight-gradient GEMMs that may run later.

    While `deferring`, layers give it their work by `defer`, and `take` hands it to the executor.

    Args:
        kernel: kernel of the GEMMs.
        on_kept: called with each operand that waits.
    """

    def __init__(
        self,
        kernel: WeightGradKernel = "separate",
        on_kept: TensorObserver = unobserved,
    ) -> None:
        self.kernel = kernel
        self._on_kept = on_kept
        self.deferring = False
        self._work: list[DeferredGrad] = []

    def defer(self, work: DeferredGrad) -> None:
        """Keep work for `take`."""
        assert self.deferring
        # Otherwise the operands would keep the graph of the backward, and with it the stage's input and its gradient.
        part, other = work.part.detach(), work.other.detach()
        self._on_kept(part)
        self._on_kept(other)
        self._work.append(replace(work, part=part, other=other))

    def take(self) -> list[DeferredGrad]:
        """Return the queued work in order, leaving the queue empty."""
        work, self._work = self._work, []
        return work


@torch.no_grad()
def add_deferred(work: list[DeferredGrad]) -> None:
    """Compute weight gradients, and empty the list; an operand is gathered under the GEMM before its own."""
    gathers = [each.gather(each.part) for each in work[:1]]
    while work:
        gathers += [each.gather(each.part) for each in work[1:2]]
        first = work.pop(0)
        first.add(gathers.pop(0).wait(), first.other)
