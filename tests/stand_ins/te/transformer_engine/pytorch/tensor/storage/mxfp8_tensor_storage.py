"""A matrix of FP8 numbers with scales of 1 x 32 blocks."""

from typing import Any

import torch


class MXFP8TensorStorage:
    """The bytes of the rows of a matrix, or of its columns, with their exponents."""

    def __new__(
        cls,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: Any,
        quantizer: Any,
        with_gemm_swizzled_scales: bool,
        *args: Any,
        fake_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> "MXFP8TensorStorage":
        instance = object.__new__(cls)
        instance._rowwise_data, instance._rowwise_scale_inv = rowwise_data, rowwise_scale_inv
        instance._columnwise_data, instance._columnwise_scale_inv = columnwise_data, columnwise_scale_inv
        instance._fp8_dtype, instance._quantizer = fp8_dtype, quantizer
        instance._with_gemm_swizzled_scales = with_gemm_swizzled_scales
        return instance
