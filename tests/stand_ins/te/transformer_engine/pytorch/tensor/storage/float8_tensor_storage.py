"""A matrix of FP8 numbers with one scale."""

from typing import Any

import torch


class Float8TensorStorage:
    """The bytes of FP8 numbers, the factor that they are multiplied by, and their format."""

    def __new__(
        cls,
        *args: Any,
        data: torch.Tensor | None,
        fp8_scale_inv: torch.Tensor,
        fp8_dtype: Any,
        fake_dtype: torch.dtype | None = None,
        data_transpose: torch.Tensor | None = None,
        quantizer: Any = None,
        transpose_invalid: bool | None = None,
        **kwargs: Any,
    ) -> "Float8TensorStorage":
        assert data is not None and data.dtype == torch.uint8 and fp8_scale_inv.dtype == torch.float32
        instance = object.__new__(cls)
        instance._data, instance._scale_inv, instance._fp8_dtype = data, fp8_scale_inv, fp8_dtype
        return instance
