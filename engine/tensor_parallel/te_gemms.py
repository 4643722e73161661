"""The GEMMs of a linear layer by Transformer Engine, in the run's dtype."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triaxis.engine.kernels.te import TransformerEngine
from triaxis.engine.tensor_parallel.fused_weights import FusedWeights
from triaxis.engine.tensor_parallel.gemms import Amax, Cut, GeluGemms, LinearForm, LinearGemms
from triaxis.engine.tensor_parallel.weight_grads import WeightGradQueue


@dataclass(frozen=True, slots=True)
class TeForm(LinearForm):
    """GEMMs by Transformer Engine."""

    te: TransformerEngine

    def gemms(
        self, weights: FusedWeights, queue: WeightGradQueue, name: str, cut: Cut, biases: FusedWeights | None = None
    ) -> LinearGemms:
        return TeGemms(weights, queue, self.te, biases)


class TeGemms(GeluGemms):
    """The GEMMs of one layer by Transformer Engine.

    Its operands are contiguous: where the matrices of a layer are not adjacent, their parts of dY are copied first.
    """

    def __init__(
        self, weights: FusedWeights, queue: WeightGradQueue, te: TransformerEngine, biases: FusedWeights | None
    ) -> None:
        super().__init__(weights, queue)
        self.te = te
        self.makes_totals = biases is not None

    def forward(self, x: torch.Tensor, biases: Sequence[torch.Tensor | None], largest: Amax) -> torch.Tensor:
        rows = x.flatten(0, -2)
        matrices = zip(self.weights.matrices(), biases, strict=True)
        outputs = [self.te.forward(rows, matrix, bias) for matrix, bias in matrices]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)).unflatten(0, x.shape[:-1])

    def forward_gelu(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        (matrix,) = self.weights.matrices()
        inner, activated = self.te.forward_gelu(x.flatten(0, -2), matrix, bias)
        return inner.unflatten(0, x.shape[:-1]), activated.unflatten(0, x.shape[:-1])

    def input_grad_of_gelu(self, grad: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        (matrix,) = self.weights.matrices()
        return self.te.input_grad_of_gelu(grad.flatten(0, -2), matrix, inner.flatten(0, -2)).view(inner.shape)

    def input_grad(self, grad: torch.Tensor, largest: Amax) -> torch.Tensor:
        matrices = self.weights.matrices()
        parts = grad.flatten(0, -2).split([matrix.shape[0] for matrix in matrices], dim=-1)
        total = None
        for part, matrix in zip(parts, matrices, strict=True):
            total = self.te.input_grad(part.contiguous(), matrix, total)
        assert total is not None
        return total.unflatten(0, grad.shape[:-1])

    def add_weight_grads(self, grad: torch.Tensor, x: torch.Tensor, of_grad: Amax, of_x: Amax) -> torch.Tensor | None:
        rows_of_grad, x = grad.flatten(0, -2), x.flatten(0, -2)
        totals = []
        for main_grad, rows, overwrite in self.weights.main_grads():
            part = rows_of_grad[:, rows].contiguous()
            total = self.te.add_weight_grad(main_grad, part, x, overwrite=overwrite, with_total=self.makes_totals)
            totals += [] if total is None else [total]
        return torch.cat(totals) if len(totals) > 1 else next(iter(totals), None)
