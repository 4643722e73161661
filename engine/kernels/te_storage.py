"""Wraps FP8 matrices in the storage classes that Transformer Engine's GEMM reads.

    blocks       storage                           scales for a matrix [rows, columns], contiguous
    whole        `Float8TensorStorage`             fp32 [1]
    1 x 128      `Float8BlockwiseQTensorStorage`   fp32 [columns / 128, rows]
    128 x 128    `Float8BlockwiseQTensorStorage`   fp32 [rows / 128, columns / 128], padded to a multiple of 4 columns
    1 x 32       `MXFP8TensorStorage`              exponents (e8m0) as bytes [rows, columns / 32], padded to multiples of 128 and 4

The shapes follow `get_scale_shape` in TE's quantisers. A storage holds only the matrix's rowwise data.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch

from triaxis.engine.kernels.fp8.block_product import padded_exponents, scales_of
from triaxis.engine.kernels.fp8.recipes import Quantised
from triaxis.engine.numerics.precision import FP8_E4M3, FP8_E5M2

_FOLDER = "transformer_engine.pytorch.tensor.storage"


@dataclass(frozen=True, slots=True)
class Storages:
    """Transformer Engine's classes for FP8 matrices.

    Attributes:
        tensor: class for a matrix with one scale.
        blocks: class for a matrix with one scale per 1 x 128 or 128 x 128 block.
        mx: class for a matrix with one scale per 1 x 32 block.
        dtypes: TE's dtype for each of torch's FP8 dtypes.
    """

    tensor: Callable[..., Any]
    blocks: Callable[..., Any]
    mx: Callable[..., Any]
    dtypes: Mapping[torch.dtype, Any]

    def stored(self, matrix: Quantised, *, is_tensorwise: bool) -> Any:
        """Wrap a matrix with contiguous rows in TE's storage, without copying the values."""
        values = matrix.values
        assert values.is_contiguous(), "TE reads bytes row by row, whatever the strides say"
        form, data = {"fp8_dtype": self.dtypes[values.dtype]}, values.view(torch.uint8)
        if is_tensorwise:
            return self.tensor(data=data, fp8_scale_inv=matrix.inverse.reshape(1), **form)
        scales = scales_of(matrix)
        rows_alone = form | {"columnwise_data": None, "columnwise_scale_inv": None, "quantizer": None}
        if scales.scaling == "BlockWise1x32":
            exponents = padded_exponents(matrix.inverse)
            return self.mx(
                rowwise_data=data, rowwise_scale_inv=exponents, with_gemm_swizzled_scales=False, **rows_alone
            )
        # `scales_of` returns a transposed view for torch's GEMM; TE takes the same numbers untransposed.
        return self.blocks(
            rowwise_data=data,
            rowwise_scale_inv=scales.tensor.t(),
            is_2D_scaled=scales.scaling == "BlockWise128x128",
            **rows_alone,
        )


def open_storages() -> Storages:
    """Import Transformer Engine's storage classes for FP8 matrices.

    Raises:
        Exception: any error that TE's import raises.
    """
    compiled = import_module("transformer_engine_torch")
    blocks = import_module(f"{_FOLDER}.float8_blockwise_tensor_storage").Float8BlockwiseQTensorStorage
    if "data_format" in inspect.signature(blocks.__new__).parameters:  # older releases have two formats and ask for one
        blocks = partial(blocks, data_format=compiled.Float8BlockScaleTensorFormat.GEMM_READY)
    formats = compiled.DType
    return Storages(
        tensor=import_module(f"{_FOLDER}.float8_tensor_storage").Float8TensorStorage,
        blocks=blocks,
        mx=import_module(f"{_FOLDER}.mxfp8_tensor_storage").MXFP8TensorStorage,
        dtypes=MappingProxyType({FP8_E4M3: formats.kFloat8E4M3, FP8_E5M2: formats.kFloat8E5M2}),
    )
