"""The three GEMMs of a linear layer, in the run's dtype (`fp8_gemms.py` has them with FP8 operands).

    forward                 Y  = X W^T (+ bias)
    gradient of the input   dX = dY W
    gradient of the weight  dW += dY^T X

X [n, in] and dY [n, out] are whole over what the layer has gathered, and are cut over tp otherwise.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from triaxis.engine.comm.ledger import Pending
from triaxis.engine.tensor_parallel.fused_weights import FusedWeights
from triaxis.engine.tensor_parallel.mappings import TensorParallelRegion
from triaxis.engine.tensor_parallel.weight_grads import WeightGradQueue

Amax = torch.Tensor | None
"""The largest absolute value of a tensor that has one FP8 scale; None: it has none, or many."""


class Cut(NamedTuple):
    """The operands of a layer that are cut over tp."""

    inputs: bool
    outputs: bool


class Entered(NamedTuple):
    """X of a column-parallel layer behind its way into the region of tensor parallelism.

    Attributes:
        whole: what `forward` reads.
        kept: what the backward restores it from.
        largest: what quantises it.
    """

    whole: torch.Tensor
    kept: torch.Tensor
    largest: Amax


class Leaving(NamedTuple):
    """dY of a row-parallel layer on its way into the region of tensor parallelism.

    Attributes:
        whole: dY [s, b, out], under way.
        kept: what a deferred gradient of the weight restores it from.
        largest: what quantises it, where that is known already.
    """

    whole: Pending
    kept: torch.Tensor
    largest: Amax


class LinearGemms:
    """The GEMMs of one layer in the run's dtype.

    Args:
        weights: of the layer, which read the same input.
        queue: has the kernel of weight gradients.

    Attributes:
        makes_totals: the GEMM of the weight gradient makes the gradient of the biases too.
    """

    makes_totals = False

    def __init__(self, weights: FusedWeights, queue: WeightGradQueue) -> None:
        self.weights = weights
        self.queue = queue

    def entered(self, x: torch.Tensor, region: TensorParallelRegion, purpose: str) -> Entered:
        """Let X [s (/t), b, in] enter the region."""
        whole = region.enter(x, purpose).wait()
        return Entered(whole, region.kept(x, whole), None)

    def enter_again(self, kept: torch.Tensor, largest: Amax, region: TensorParallelRegion, purpose: str) -> Pending:
        """Restore the whole of X [s, b, in], as `forward` has read it, from what was kept."""
        return region.enter_again(kept, purpose)

    def leaving(self, grad: torch.Tensor, region: TensorParallelRegion, purpose: str) -> Leaving:
        """Post the backward of g or g' for dY [s (/t), b, out]."""
        return Leaving(region.leave_backward(grad, purpose), grad, None)

    def stored(self, x: torch.Tensor, largest: Amax) -> torch.Tensor:
        """Return X [.., in], which this rank has whole, as `forward` reads it and the backward keeps it."""
        return x

    def input_amax(self, x: torch.Tensor) -> Amax:
        """Return what `forward` and `add_weight_grads` need of X to quantise it."""
        return None

    def grad_amax(self, grad: torch.Tensor) -> Amax:
        """Return what `input_grad` and `add_weight_grads` need of dY."""
        return None

    def forward(self, x: torch.Tensor, biases: Sequence[torch.Tensor | None], largest: Amax) -> torch.Tensor:
        """Return Y [.., out] of x [.., in]; `biases` has one vector, or None, for each matrix of the weights."""
        rows = x.view(-1, x.shape[-1])
        outputs = [
            torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)
            for matrix, bias in zip(self.weights.transposes(), biases, strict=True)
        ]
        whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return whole.view(*x.shape[:-1], whole.shape[-1])

    def input_grad(self, grad: torch.Tensor, largest: Amax) -> torch.Tensor:
        """Return dX [.., in] of grad [.., out], whose columns are cut as the rows of the matrices are stacked."""
        matrices = self.weights.matrices()
        rows = grad.view(-1, grad.shape[-1])
        parts = [rows] if len(matrices) == 1 else rows.split([matrix.shape[0] for matrix in matrices], dim=-1)
        total = torch.mm(parts[0], matrices[0])
        for part, matrix in zip(parts[1:], matrices[1:], strict=True):
            total += torch.mm(part, matrix)
        return total.view(*grad.shape[:-1], total.shape[-1])

    def add_weight_grads(self, grad: torch.Tensor, x: torch.Tensor, of_grad: Amax, of_x: Amax) -> torch.Tensor | None:
        """Add dY^T X to the main grads of the trained weights; grad [.., out], x [.., in].

        Return the sum of dY over the tokens [out] if `makes_totals`, else None.
        """
        grad, x = grad.view(-1, grad.shape[-1]), x.view(-1, x.shape[-1])
        for main_grad, rows, overwrite in self.weights.main_grads():
            part = grad if rows == self.weights.all_rows else grad[:, rows]
            self.queue.add_matmul(main_grad, part, x, overwrite=overwrite)
        return None


class GeluGemms(LinearGemms):
    """GEMMs that compute the GELU (its tanh form) between a layer and the one that reads it, in their epilogues.

    first layer     inner = X W^T + bias, activated = GELU(inner)
    second layer    d inner = dY W GELU'(inner)
    """

    @abstractmethod
    def forward_gelu(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inner and activated [.., out] of x [.., in], by a layer of one matrix and its bias [out]."""

    @abstractmethod
    def input_grad_of_gelu(self, grad: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        """Return d inner [.., in] of grad [.., out], by a layer of one matrix whose input was GELU(inner)."""


class LinearForm:
    """The form of the GEMMs of some layers: in the run's dtype."""

    def alone(self, *parts: str) -> "LinearForm":
        """Return that of a layer whose input nothing else keeps, unless one of these parts (`recompute.modules`) is made again."""
        return self

    def gemms(
        self, weights: FusedWeights, queue: WeightGradQueue, name: str, cut: Cut, biases: FusedWeights | None = None
    ) -> LinearGemms:
        """Build the GEMMs of a layer; `biases` are those whose gradient they may make."""
        return LinearGemms(weights, queue)


IN_RUN_DTYPE = LinearForm()
