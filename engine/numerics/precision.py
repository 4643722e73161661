"""The dtype of each quantity; the only place where floating-point dtypes are named or promoted.

Weights and activations use the run's dtype. Sums that must not lose bits (main grads, masters, moments, softmax, norms, RoPE
tables, cross-entropy, gradient norms, the loss) use its accumulation dtype: at least fp32, and never narrower than the run's dtype,
so a float64 run stays float64 throughout. Main grads and optimizer state can be narrowed by name.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "float64": torch.float64}
)
"""Torch dtypes by their names in the configuration (`precision.dtype`)."""

INIT_DTYPE = torch.float32
"""Dtype of the draws of initial weights, which are then cast to the run's."""

AGREEMENT_DTYPE = torch.float64
"""Dtype of the step's small all-reduce: token counts (exact to 2^53) and sums of squares of gradients."""

FP8_E4M3 = torch.float8_e4m3fn
"""Dtype of FP8 weights and activations: 4 bits of exponent, 3 of mantissa, no infinity."""

FP8_E5M2 = torch.float8_e5m2
"""Dtype of FP8 gradients where one scale serves a whole tensor: 5 bits of exponent, 2 of mantissa."""

SCALE_DTYPE = torch.float32
"""Dtype of the scales of FP8 numbers."""

MX_SCALE_DTYPE = torch.float8_e8m0fnu
"""Dtype of the scales of MX blocks as GEMMs read them: 8 bits of exponent, powers of two alone; it has NaN, and no infinity."""

STEP_DTYPE = torch.float32
"""Dtype of step counts and skip flags for torch's fused optimizers; whole numbers are exact to 2^24."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of `dtype` values: the wider of it and float32."""
    # Called in compiled kernels too: torch.promote_types would be a call into torch, and a cache stops the compiler.
    return dtype if dtype.itemsize > torch.float32.itemsize else torch.float32


def main_grad_dtype(dtype: torch.dtype, choice: Literal["full", "bf16"]) -> torch.dtype:
    """Return the dtype of gradient sums and reductions (`precision.gradients`): the accumulation dtype, or that of the weights."""
    return accumulation_dtype(dtype) if choice == "full" else dtype


def accumulate(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in its accumulation dtype; the tensor itself if it has that."""
    return tensor.to(accumulation_dtype(tensor.dtype))
