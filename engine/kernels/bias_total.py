"""Sums a linear layer's bias gradient in the function that computes dY, the layer's output gradient.

A bias gradient is dY summed over tokens. The function that computes dY still has dY in registers or in a cache. A later sum would
read dY from memory again.
"""

from collections.abc import Callable

import torch

from triaxis.engine.numerics.precision import accumulation_dtype

AddTotal = Callable[[torch.Tensor], None] | None
"""Callback for a gradient summed over tokens, [n] in the accumulation dtype; None if no sum is wanted."""


def total_of(grad: torch.Tensor) -> torch.Tensor:
    """Sum a gradient [.., n] over all dims but the last: [n] in the accumulation dtype."""
    return grad.flatten(0, -2).sum(0, dtype=accumulation_dtype(grad.dtype))


def adding(
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor]], add_total: Callable[[torch.Tensor], None]
) -> Callable[..., torch.Tensor]:
    """Return a backward that hands the second result of `backward`, a gradient's sum, to `add_total`."""

    def added(*tensors: torch.Tensor) -> torch.Tensor:
        grad, total = backward(*tensors)
        add_total(total)
        return grad

    return added
