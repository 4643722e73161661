"""Gathers whole rows over cp before attention.

    rows [s/c, b, n, d] --all-gather--> [s, b, n, d]      backward: reduce-scatter

The rows are MLA latents, or keys and values for the `explicit` kernel. Gathered rows are saved for the backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from triaxis.engine.activations.linear_map import mapped
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

    copies_rows: ClassVar[bool] = True

    region: ContextParallelRegion

    def __call__(
        self, q: torch.Tensor, rows: Sequence[torch.Tensor], mask: Mask, keys: DropoutKeys | None
    ) -> torch.Tensor:
        """Attend from q [s/c, b, n, d] to the gathered `rows` -> [s/c, b, n * d_v].

        `rows` are this rank's k and v, or MLA latents, [s/c, b, n_i, d] each.
        """
        packed = rows[0] if len(rows) == 1 else torch.cat(tuple(rows), dim=2)
        assert mask.part is not None
        whole = mapped(packed, partial(self._gathered, mask.part), partial(self._summed, mask.part))
        return self.mixed(q, whole.split([each.shape[2] for each in rows], dim=2), mask, keys)

    def _gathered(self, part: SequencePart, x: torch.Tensor) -> torch.Tensor:
        """All-gather the cp ranks' parts, and restore the order of tokens in their rows (samples)."""
        return reordered(self.region.axis.all_gather(x, f"{KEYS_AND_VALUES} forward").wait(), part.to_rows)

    def _summed(self, part: SequencePart, grad: torch.Tensor) -> torch.Tensor:
        """Sum gradients over cp, and keep this rank's part (reduce-scatter)."""
        region = self.region
        wide = grad.to(accumulation_dtype(grad.dtype) if region.sums_wide else grad.dtype)
        summed = region.axis.reduce_scatter(reordered(wide, part.to_parts), f"{KEYS_AND_VALUES} gradients")
        return summed.wait().to(grad.dtype)
