"""Defers weight-gradient GEMMs, so that zero-bubble schedules can run them later."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from triaxis.engine.activations.saved_tensors import TensorObserver, unobserved
from triaxis.engine.comm.backends import Pending
from triaxis.engine.kernels.weight_grad import WeightGradKernel


@dataclass(frozen=True, slots=True)
class DeferredGrad:
    """One layer's weight gradient for one microbatch, still to be computed.

    Attributes:
        part: one operand as this rank saved it; with sequence parallelism its shard [s/t, b, h].
        gather: function (part) that posts the gather to [s, b, h].
        other: the other operand, whole.
        add: function (gathered operand, other operand) that adds their product to the main grads.
    """

    part: torch.Tensor
    gather: Callable[[torch.Tensor], Pending]
    other: torch.Tensor
    add: Callable[[torch.Tensor, torch.Tensor], None]


class WeightGradQueue:
    """Weight-gradient GEMMs that may run later.

    While `deferring` is set, layers queue work with `defer`. The executor collects the work with `take`.

    Args:
        kernel: GEMM kernel.
        on_kept: function called with each operand tensor that the queue keeps.
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
        """Queue a weight gradient until `take` collects it; allowed only while `deferring` is set."""
        assert self.deferring
        # Detached, because their autograd graph would keep the stage's input and its gradient alive.
        part, other = work.part.detach(), work.other.detach()
        self._on_kept(part)
        self._on_kept(other)
        self._work.append(replace(work, part=part, other=other))

    def take(self) -> list[DeferredGrad]:
        """Empty the queue and return its work in order."""
        work, self._work = self._work, []
        return work


@torch.no_grad()
def add_deferred(work: list[DeferredGrad]) -> None:
    """Add the deferred weight gradients to the main grads, and empty the list. Each gather overlaps the previous GEMM."""
    gathers = [each.gather(each.part) for each in work[:1]]
    while work:
        gathers += [each.gather(each.part) for each in work[1:2]]
        first = work.pop(0)
        first.add(gathers.pop(0).wait(), first.other)
