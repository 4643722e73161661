"""Hidden-state dropout, fused with the addition to the residual stream after it."""

import torch
from torch import nn

from triaxis.engine.kernels.fusion import Fusion
from triaxis.engine.tensor_parallel.dropout import DropoutKeys, dropout
from triaxis.engine.tensor_parallel.mappings import TensorParallelRegion


class HiddenDropout(nn.Module):
    """Dropout on [s(/t), b, h] in training.

    A hash of an element's index in its sample's whole [s, h] decides whether the element is dropped, so the layout does not matter.

    Args:
        p: probability that an element is dropped.
        site: this dropout's name, which the hash includes.
        factor: multiplier on x when x is added to a residual.
    """

    def __init__(self, p: float, site: str, region: TensorParallelRegion, fusion: Fusion, factor: float) -> None:
        super().__init__()
        self.p, self.site, self.region, self.fusion, self.factor = p, site, region, fusion, factor

    def forward(self, x: torch.Tensor, keys: DropoutKeys, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Apply dropout to x. With `residual`, multiply x by `factor` and return dropout(x) + residual."""
        if residual is not None and self.factor != 1:
            x = x * self.factor
        length = x.shape[0] * (self.region.axis.size if self.region.sequence_parallel else 1)
        rows = keys.rows(length, x.device)[self.region.shard_of_sequence(length)]
        positions = rows.unsqueeze(-1) * x.shape[-1] + torch.arange(x.shape[-1], device=x.device)
        return dropout(x, self.p, keys, self.site, positions, batch_dim=1, fusion=self.fusion, residual=residual)
