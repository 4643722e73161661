"""Computes the logits z = c tanh(y / (d c)) from the head's product y.

y is the hidden state times the head's weight, d the divisor and c the cap in `LogitOptions`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from triaxis.engine.kernels.fusion import Fusion
from triaxis.engine.numerics.precision import accumulate

CHUNK_NUMEL: Mapping[str, int] = MappingProxyType({"cpu": 2**18, "cuda": 2**25})
"""Elements per chunk, by device: a CPU chunk fits a core's cache (in the wide dtype), a GPU chunk keeps the kernel count low."""


@dataclass(frozen=True, slots=True)
class LogitOptions:
    """A model's options for logits z, computed from y = hidden state times head weight.

    Attributes:
        divisor: divisor d applied to y (Granite's `logits_scaling`).
        softcap: cap c in z = c tanh(y / (d c)) (Gemma 2, 2408.00118), or None for z = y / d.
        z_loss: factor on log(sum_v exp(z_v))^2 in the trained loss (PaLM, 2204.02311, section 5).
    """

    divisor: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether the logits are hidden state times head weight, without divisor and cap."""
        return self.divisor == 1 and self.softcap is None

    def shape_(self, y: torch.Tensor, fusion: Fusion) -> None:
        """Turn y [.., v] into logits in place. They are computed in the accumulation dtype and rounded once."""
        if self.is_plain:
            return
        flat = y.view(-1, y.shape[-1])
        if fusion.is_compiled:
            fusion(_shape_all_)(flat, self.divisor, self.softcap)
            return
        for rows in chunks(flat):
            flat[rows] = _shaped(flat[rows], self.divisor, self.softcap)

    def shaped(self, y: torch.Tensor) -> torch.Tensor:
        """Compute the logits from y [.., v] = hidden state times head weight, with autograd; y stays unchanged."""
        return y if self.is_plain else _shaped(y, self.divisor, self.softcap)


PLAIN_LOGITS = LogitOptions()


def chunks(z: torch.Tensor) -> Iterator[slice]:
    """Yield slices over the tokens in z [tokens, v], each of about `CHUNK_NUMEL` elements."""
    num_rows = max(1, CHUNK_NUMEL[z.device.type] // z.shape[1])
    for start in range(0, z.shape[0], num_rows):
        yield slice(start, start + num_rows)


def slope(z: torch.Tensor, divisor: float, softcap: float | None) -> torch.Tensor | float:
    """Compute dz / dy = (1 - (z / c)^2) / d from the logits, in the accumulation dtype."""
    if softcap is None:
        return 1 / divisor
    return (1 - (accumulate(z) / softcap).square()) / divisor


def _shaped(y: torch.Tensor, divisor: float, softcap: float | None) -> torch.Tensor:
    z = accumulate(y) / divisor
    return (z if softcap is None else softcap * torch.tanh(z / softcap)).to(y.dtype)


def _shape_all_(y: torch.Tensor, divisor: float, softcap: float | None) -> None:
    y.copy_(_shaped(y, divisor, softcap))
