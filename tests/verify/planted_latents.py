"""Bugs of latent attention, planted at run time in ranks under verification."""

from typing import Any

import torch

from tests.parity.cases import Case
from tests.verify.bug import Bug, anything, is_attention
from triaxis.engine.context_parallel.gathered_rows import GatheredRows
from triaxis.engine.tensor_parallel.entered import _Entered


def latents_have_the_gradients_of_this_ranks_heads() -> None:
    """What all heads read gets the gradient of those on the rank."""
    _Entered.backward = staticmethod(lambda ctx, grad: (grad, None, None))  # type: ignore[method-assign]


def latents_stay_in_the_order_of_ranks() -> None:
    """The gathered latents of blocks that were dealt out are not put back in the order of the row."""

    def unordered(self: GatheredRows, part: Any, x: torch.Tensor) -> torch.Tensor:
        return self.region.axis.all_gather(x, "keys and values forward").wait()

    GatheredRows._gathered = unordered  # type: ignore[method-assign]


BUGS = (
    Bug(
        latents_have_the_gradients_of_this_ranks_heads,
        Case("mla", tp=2, dp=2, global_batch_size=4),
        "gradient",
        anything,
        "tp",
        "tp",
    ),
    Bug(
        latents_stay_in_the_order_of_ranks,
        Case("mla", cp=2, dp=2, global_batch_size=4),
        "output",
        is_attention(0),
        "cp",
        "vanishes with cp=1",
    ),
)
