"""The three GEMMs of a linear layer, in the run's dtype (`fp8_gemms.py` has them with FP8 operands).

    forward                 Y  = X W^T (+ bias)
    gradient of the input   dX = dY W
    gradient of the weight  dW += dY^T X

X [n, in] and dY [n, out] are whole over what the layer has gathered, and are cut over tp otherwise.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.tensor_parallel.parameter import FusedWeights
from engine.tensor_parallel.weight_grads import WeightGradQueue

Amax = torch.Tensor | None
"""The largest absolute value of a tensor that has one FP8 scale; None: it has none, or many."""


class Cut(NamedTuple):
    """The operands of a layer that are cut over tp."""

    inputs: bool
    outputs: bool


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

    def input_amax(self, x: torch.Tensor) -> Amax:
        """Return what `forward` and `add_weight_grads` need of X to quantise it."""
        return None

    def grad_amax(self, grad: torch.Tensor) -> Amax:
        """Return what `input_grad` and `add_weight_grads` need of dY."""
        return None

    def forward(self, x: torch.Tensor, biases: Sequence[torch.Tensor | None], largest: Amax) -> torch.Tensor:
        """Return Y [.., out] of x [.., in]; `biases` has one vector, or None, for each matrix of the weights."""
        matrices = self.weights.matrices()
        outputs = [_project(x, matrix, bias) for matrix, bias in zip(matrices, biases, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def input_grad(self, grad: torch.Tensor, largest: Amax) -> torch.Tensor:
        """Return dX [.., in] of grad [.., out], whose columns are cut as the rows of the matrices are stacked."""
        matrices = self.weights.matrices()
        parts = grad.split([matrix.shape[0] for matrix in matrices], dim=-1)
        total = _project(parts[0], matrices[0].t())
        for part, matrix in zip(parts[1:], matrices[1:], strict=True):
            total += _project(part, matrix.t())
        return total

    def add_weight_grads(self, grad: torch.Tensor, x: torch.Tensor, of_grad: Amax, of_x: Amax) -> torch.Tensor | None:
        """Add dY^T X to the main grads of the trained weights; grad [.., out], x [.., in].

        Return the sum of dY over the tokens [out] if `makes_totals`, else None.
        """
        rows_of_grad, x = grad.flatten(0, -2), x.flatten(0, -2)
        for main_grad, rows, overwrite in self.weights.main_grads():
            self.queue.add_matmul(main_grad, rows_of_grad[:, rows], x, overwrite=overwrite)
        return None


class LinearForm:
    """The form of the GEMMs of some layers: in the run's dtype."""

    def gemms(
        self, weights: FusedWeights, queue: WeightGradQueue, name: str, cut: Cut, biases: FusedWeights | None = None
    ) -> LinearGemms:
        """Build the GEMMs of a layer; `biases` are those whose gradient they may make."""
        return LinearGemms(weights, queue)


IN_RUN_DTYPE = LinearForm()


def _project(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [.., in] W^T + bias as [.., out], in one GEMM; matrix W [out, in], bias [out]."""
    return F.linear(x.flatten(0, -2), matrix, bias).view(*x.shape[:-1], matrix.shape[0])
