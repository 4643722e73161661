"""Which dtype holds what. The one place where a floating-point dtype is named or promoted.

Weights and activations use the run's dtype. Sums that must not lose bits (main grads, masters, moments, softmax, norms,
RoPE tables, cross-entropy, gradient norms, the loss) use its accumulation dtype: fp32 for 16-bit runs, and never less
than the run's own dtype, so that a float64 run stays float64 throughout. Main grads and optimizer state can be narrowed by name.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

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


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of `dtype` values are kept in: the wider of it and float32."""
    # Asked for in every kernel, inside compiled ones too: torch.promote_types is a call into torch, and a cache stops the compiler.
    return dtype if dtype.itemsize > torch.float32.itemsize else torch.float32


def main_grad_dtype(dtype: torch.dtype, choice: Literal["full", "bf16"]) -> torch.dtype:
    """What gradients are added up and reduced in (`precision.gradients`): the accumulation dtype, or that of the weights."""
    return accumulation_dtype(dtype) if choice == "full" else dtype


def accumulate(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in its accumulation dtype; the tensor itself when it already has it."""
    return tensor.to(accumulation_dtype(tensor.dtype))
