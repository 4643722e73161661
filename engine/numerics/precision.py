"""Chooses the dtype of each quantity. No other module names or promotes floating-point dtypes.

Weights and activations use the run's dtype. Sums that must not lose bits use the accumulation dtype, which is the run's dtype or
fp32, whichever is wider. Such sums are main grads, masters, moments, softmax, norms, RoPE tables, cross-entropy, gradient norms,
the loss. The configuration can narrow main grads and optimizer state.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "float64": torch.float64}
)
"""Torch dtype for each name that the configuration accepts (`precision.dtype`)."""

STORED_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({**DTYPES, "int16": torch.int16})
"""Torch dtypes of stored state by their names (`engine/config/quantities/state_plan.py`); int16 are a split master's lower bits."""

INIT_DTYPE = torch.float32
"""Dtype in which initial weights are drawn, before they are cast to the run's dtype."""

AGREEMENT_DTYPE = torch.float64
"""Dtype of the step's small all-reduce: token counts (exact to 2^53) and gradients' sums of squares."""

FP8_E4M3 = torch.float8_e4m3fn
"""Dtype of FP8 weights and activations: 4 exponent bits, 3 mantissa bits, no infinity."""

FP8_E5M2 = torch.float8_e5m2
"""Dtype of FP8 gradients when one scale serves a whole tensor: 5 exponent bits, 2 mantissa bits."""

SCALE_DTYPE = torch.float32
"""Dtype of FP8 scales."""

MX_SCALE_DTYPE = torch.float8_e8m0fnu
"""Dtype of MX block scales as GEMMs read them: 8 exponent bits, only powers of two; it has NaN but no infinity."""

STEP_DTYPE = torch.float32
"""Dtype of step counts and skip flags for torch's fused optimizers; whole numbers are exact to 2^24."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype for sums over `dtype` values, the wider of `dtype` and float32."""
    # Compiled kernels call this too. torch.promote_types would be a call into torch, and the compiler cannot trace a cache.
    return dtype if dtype.itemsize > torch.float32.itemsize else torch.float32


def main_grad_dtype(dtype: torch.dtype, choice: Literal["full", "bf16"]) -> torch.dtype:
    """Return the dtype for gradient sums (`precision.gradients`).

    `full` is the accumulation dtype, `bf16` the weights' dtype.
    """
    return accumulation_dtype(dtype) if choice == "full" else dtype


def accumulate(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor to its accumulation dtype. A tensor that has this dtype already is returned as is."""
    return tensor.to(accumulation_dtype(tensor.dtype))
