"""One microbatch's work in one chunk: its forward, its backward, and the weight gradients that the backward defers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from triaxis.engine.activations.backward import run_backward
from triaxis.engine.linear.weight_grads import DeferredGrad, WeightGradQueue, add_deferred
from triaxis.engine.pipeline.lowering import Instruction

ChunkFunction = Callable[[int, torch.Tensor | None, Any], torch.Tensor]
"""Function (number of this rank's chunk, x or None on the first stage, microbatch) -> the chunk's output."""


class Work(Protocol):
    """One microbatch's work in one chunk. Each method is called once, in this order."""

    def forward(self, x: torch.Tensor | None, microbatch: Any) -> torch.Tensor:
        """Run the chunk and return its output, detached.

        Args:
            x: input [s(/t), b, h], a leaf that gets a gradient; None on the first stage.
        """

    def backward(self, grad: torch.Tensor, *, defers: bool) -> torch.Tensor | None:
        """Run the backward. Return the input's gradient, None on the first stage.

        Args:
            grad: the output's gradient.
            defers: whether weight-gradient GEMMs are left to `weight_grads`.
        """

    def weight_grads(self) -> None:
        """Run the weight-gradient GEMMs that the backward deferred. Called only if it deferred some."""


WorkOf = Callable[[int, int], Work]
"""Function (chunk, microbatch) -> its work in one run of a program."""

WorksOf = Callable[[Sequence[Instruction], ChunkFunction, Sequence[WeightGradQueue]], WorkOf]
"""Function (this rank's instructions, chunk function, each chunk's queue) -> the works of one run with a backward."""


@dataclass(eq=False, slots=True)
class EagerWork:
    """Work that calls each operator. Between forward and backward it keeps the input and an edge into the autograd graph."""

    function: Callable[[torch.Tensor | None, Any], torch.Tensor]
    queue: WeightGradQueue
    _x: torch.Tensor | None = field(default=None, init=False)
    _edge: GradientEdge | None = field(default=None, init=False)
    _deferred: list[DeferredGrad] = field(default_factory=list, init=False)

    def forward(self, x: torch.Tensor | None, microbatch: Any) -> torch.Tensor:
        self._x = None if x is None else x.requires_grad_()
        output = self.function(x, microbatch)
        self._edge = get_gradient_edge(output)
        # The next stage has its own graph, even if it is on this rank.
        return output.detach()

    def backward(self, grad: torch.Tensor, *, defers: bool) -> torch.Tensor | None:
        x, edge, self._x, self._edge = self._x, self._edge, None, None
        assert edge is not None, "a backward comes after its forward"
        # Layers ask the queue inside their backward. Deferred GEMMs wait for this microbatch's W, last layer first.
        self.queue.deferring = defers
        run_backward(edge, grad)
        if defers:
            self.queue.deferring = False
            self._deferred = self.queue.take()
        return None if x is None else x.grad

    def weight_grads(self) -> None:
        add_deferred(self._deferred)


def eager_works(
    instructions: Sequence[Instruction], function: ChunkFunction, queues: Sequence[WeightGradQueue]
) -> WorkOf:
    """Return works that call each operator (`WorksOf`)."""
    return lambda chunk, microbatch: EagerWork(partial(function, chunk), queues[chunk])
