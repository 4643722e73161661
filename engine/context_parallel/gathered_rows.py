"""Gathers whole rows over cp before attention.

    rows [s/c, b, n, d] --all-gather--> [s, b, n, d]      backward: reduce-scatter

The rows are MLA latents, or keys and values for the `explicit` kernel. Gathered rows are saved for the backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from triaxis.engine.comm.ledger import KEYS_AND_VALUES
from triaxis.engine.context_parallel.attention import ContextParallelRegion, reordered
from triaxis.engine.context_parallel.mixer import Mixer
from triaxis.engine.data.sequence_part import SequencePart
from triaxis.engine.kernels.masked_attention import Mask
from triaxis.engine.numerics.precision import accumulation_dtype
from triaxis.engine.tensor_parallel.dropout import DropoutKeys


@dataclass(kw_only=True, eq=False)
class GatheredRows(Mixer):
    """Mixer that gathers k and v, or MLA latents, in one collective before attention."""

    region: ContextParallelRegion

    def __call__(
        self, q: torch.Tensor, rows: Sequence[torch.Tensor], mask: Mask, keys: DropoutKeys | None
    ) -> torch.Tensor:
        """Attend from q [s/c, b, n, d] to the gathered `rows` -> [s/c, b, n * d_v].

        `rows` are this rank's k and v, or MLA latents, [s/c, b, n_i, d] each.
        """
        packed = rows[0] if len(rows) == 1 else torch.cat(tuple(rows), dim=2)
        whole = _Gather.apply(packed, mask.part, self.region)
        return self.mixed(q, whole.split([each.shape[2] for each in rows], dim=2), mask, keys)


class _Gather(torch.autograd.Function):
    """All-gather the cp ranks' parts, and restore the order of tokens in their rows (samples).

    The backward sums the gradients over cp and keeps this rank's part (reduce-scatter).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: SequencePart, region: ContextParallelRegion) -> torch.Tensor:
        ctx.part, ctx.region = part, region
        return reordered(region.axis.all_gather(x, f"{KEYS_AND_VALUES} forward").wait(), part.to_rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        region: ContextParallelRegion = ctx.region
        wide = grad.to(accumulation_dtype(grad.dtype) if region.sums_wide else grad.dtype)
        summed = region.axis.reduce_scatter(reordered(wide, ctx.part.to_parts), f"{KEYS_AND_VALUES} gradients")
        return summed.wait().to(grad.dtype), None, None
