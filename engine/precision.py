"""Which dtype holds what. The one place where a floating-point dtype is named or promoted.

Weights and activations use the run's dtype. Sums that must not lose bits (main grads, masters, moments, softmax, norms,
RoPE tables, cross-entropy, gradient norms, the loss) use its accumulation dtype: fp32 for 16-bit runs, and never less
than the run's own dtype, so that a float64 run stays float64 throughout.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import torch

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "float64": torch.float64}
)
"""Names in the configuration (`precision.dtype`) and what they are in torch."""

INIT_DTYPE = torch.float32
"""Initial weights are drawn in this dtype whatever the run's dtype is, then cast."""

AGREEMENT_DTYPE = torch.float64
"""The step's small vector all-reduce: it counts tokens (exact to 2^53) and sums squares of gradients."""

STEP_DTYPE = torch.float32
"""What torch's fused optimizers take step counts and skip flags in; whole numbers are exact to 2^24."""


@cache
def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of `dtype` values are kept in: promote_types(dtype, float32)."""
    return torch.promote_types(dtype, torch.float32)


def accumulate(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in its accumulation dtype; the tensor itself when it already has it."""
    return tensor.to(accumulation_dtype(tensor.dtype))
