"""A matrix of FP8 numbers with scales of 1 x 128 or 128 x 128 blocks."""

from typing import Any

import torch


class Float8BlockwiseQTensorStorage:
    """The bytes of the rows of a matrix, or of its columns, with their scales."""

    def __new__(
        cls,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: Any,
        quantizer: Any,
        is_2D_scaled: bool,  # noqa: N803 (TE's name)
        *args: Any,
        fake_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> "Float8BlockwiseQTensorStorage":
        instance = object.__new__(cls)
        instance._rowwise_data, instance._rowwise_scale_inv = rowwise_data, rowwise_scale_inv
        instance._columnwise_data, instance._columnwise_scale_inv = columnwise_data, columnwise_scale_inv
        instance._fp8_dtype, instance._quantizer, instance._is_2D_scaled = fp8_dtype, quantizer, is_2D_scaled
        return instance
