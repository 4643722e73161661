"""The gradient of a bias, summed where the gradient of the linear layer's output is made.

A bias is added to every token, so its gradient is dY summed over the tokens. The function that makes dY has it in registers or
in a cache; summed later, by the layer, it would be read from memory once more.
"""

from collections.abc import Callable

import torch

from triaxis.engine.numerics.precision import accumulation_dtype

AddTotal = Callable[[torch.Tensor], None] | None
"""Takes the sum of a gradient over its tokens, [n] in the accumulation dtype; None: nothing takes it."""


def total_of(grad: torch.Tensor) -> torch.Tensor:
    """Return the sum of a gradient [.., n] over all dims but the last: [n] in the accumulation dtype."""
    return grad.flatten(0, -2).sum(0, dtype=accumulation_dtype(grad.dtype))
