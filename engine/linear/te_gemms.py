"""Computes a linear layer's GEMMs by Transformer Engine, in the run's dtype."""

from dataclasses import dataclass

import torch

from triaxis.engine.kernels.te import TransformerEngine
from triaxis.engine.linear.products import LinearForm, LinearGemms, LinearParts, Operand


@dataclass(frozen=True, slots=True)
class TeForm(LinearForm):
    """The form that builds a layer's products as Transformer Engine GEMMs."""

    te: TransformerEngine

    def gemms(self, parts: LinearParts) -> LinearGemms:
        return TeGemms(parts, self.te)


class TeGemms(LinearGemms):
    """One layer's products by Transformer Engine.

    If a layer has several matrices, each matrix's columns of dY are copied first, because TE needs contiguous operands.
    """

    def __init__(self, parts: LinearParts, te: TransformerEngine) -> None:
        super().__init__(parts, makes_totals=True)
        self.te = te

    def forward(self, x: Operand) -> torch.Tensor:
        rows = x.tensor.flatten(0, -2)
        pairs = zip(self.weights.complete().views, self.vectors(), strict=False)
        outputs = [self.te.forward(rows, matrix, bias) for matrix, bias in pairs]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)).unflatten(0, x.tensor.shape[:-1])

    def input_grad(self, grad: Operand) -> torch.Tensor:
        matrices = self.weights.complete().views
        parts = grad.tensor.flatten(0, -2).split([matrix.shape[0] for matrix in matrices], dim=-1)
        total = None
        for part, matrix in zip(parts, matrices, strict=True):
            total = self.te.input_grad(part.contiguous(), matrix, total)
        assert total is not None
        return total.unflatten(0, grad.tensor.shape[:-1])

    def add_products(self, grad: Operand, x: Operand) -> torch.Tensor | None:
        totals: list[torch.Tensor] = []

        def add(main_grad: torch.Tensor, part: torch.Tensor, x: torch.Tensor, *, overwrite: bool) -> None:
            part = part.contiguous()
            total = self.te.add_weight_grad(main_grad, part, x, overwrite=overwrite, with_total=self.makes_totals)
            totals.extend([] if total is None else [total])

        self.weights.accumulate(grad.tensor.flatten(0, -2), x.tensor.flatten(0, -2), add)
        return torch.cat(totals) if len(totals) > 1 else next(iter(totals), None)
