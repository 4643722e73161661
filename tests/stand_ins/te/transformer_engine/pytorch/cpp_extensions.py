"""`general_gemm`, computed by torch in the accumulation dtype of its operands.

What the real one reads from raw pointers is contiguous, or it would read other numbers without an error: here that is an assertion.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from transformer_engine_torch import DType

from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

FORMATS = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}
STORAGES = (Float8TensorStorage, Float8BlockwiseQTensorStorage, MXFP8TensorStorage)
calls: list[str] = []
"""The layouts of the calls of this process."""


def general_gemm(
    A: Any,  # noqa: N803 (TE's names)
    B: Any,  # noqa: N803
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: torch.Tensor = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
) -> Iterable[torch.Tensor | None]:
    assert layout in ("TN", "NN", "NT"), layout
    assert (quantization_params, ub, ub_type, extra_output, bulk_overlap, alpha, beta) == (None,) * 4 + (
        False,
        1.0,
        None,
    )
    calls.append(layout)
    is_fp8 = isinstance(A, STORAGES)
    assert type(A) is type(B)
    # The tensor cores of a Hopper take FP8 in this layout alone.
    assert not is_fp8 or layout == "TN"
    # Only a forward with one scale for each tensor may sum in fewer bits than fp32.
    assert not is_fp8 or use_split_accumulator or (isinstance(A, Float8TensorStorage) and not accumulate)
    # cuBLASLt has no product of two matrices with scales of 128 x 128.
    assert not isinstance(A, Float8BlockwiseQTensorStorage) or not (A._is_2D_scaled and B._is_2D_scaled)
    assert not (gelu and is_fp8)
    right, left = _values(A), _values(B)
    product = (left.t() if layout[1] == "T" else left) @ (right.t() if layout[0] == "T" else right)
    dtype = out_dtype or (torch.bfloat16 if is_fp8 else A.dtype)
    bias_grad = gelu_input = None
    if bias is not None and not grad:
        product = product + bias.to(product.dtype)
    if bias is not None and grad:
        assert layout == "NT", (
            "the gradient of the bias is the sum of dY over the tokens, in the GEMM that contracts them"
        )
        bias_grad = left.sum(0).to(dtype)
    if gelu and not grad:
        gelu_input = product.to(dtype)
        product = F.gelu(product, approximate="tanh")
    if gelu and grad:
        assert gelu_in.is_contiguous() and gelu_in.shape == product.shape
        product = torch.ops.aten.gelu_backward(product, gelu_in.to(product.dtype), approximate="tanh")
    if out is None:
        assert not accumulate
        return product.to(dtype), bias_grad, gelu_input, None
    if not out.is_contiguous():
        raise ValueError("Output tensor is not contiguous.")
    assert out.shape == product.shape and out.dtype == dtype
    out.copy_(out + product if accumulate else product)
    return out, bias_grad, gelu_input, None


def _values(operand: Any) -> torch.Tensor:
    """Return the numbers of an operand [rows, columns] in the accumulation dtype."""
    if isinstance(operand, Float8TensorStorage):
        data = operand._data
        assert data.dim() == 2 and data.is_contiguous() and data.shape[1] % 16 == 0
        return data.view(FORMATS[operand._fp8_dtype]).float() * operand._scale_inv
    if isinstance(operand, (Float8BlockwiseQTensorStorage, MXFP8TensorStorage)):
        return _in_blocks(operand)
    assert operand.dim() == 2 and operand.is_contiguous()
    return operand if operand.dtype == torch.float64 else operand.float()


def _in_blocks(operand: Float8BlockwiseQTensorStorage | MXFP8TensorStorage) -> torch.Tensor:
    """Return the numbers of a matrix of which only the rows are given, with scales of blocks."""
    assert operand._columnwise_data is None and operand._columnwise_scale_inv is None and operand._quantizer is None
    data, scales = operand._rowwise_data, operand._rowwise_scale_inv
    assert data.dim() == 2 and data.is_contiguous() and data.dtype == torch.uint8 and scales.is_contiguous()
    rows, columns = data.shape
    if isinstance(operand, MXFP8TensorStorage):
        assert not operand._with_gemm_swizzled_scales and scales.dtype == torch.uint8
        assert scales.shape == (_padded(rows, 128), _padded(columns // 32, 4))
        inverse = scales.view(torch.float8_e8m0fnu).float()[:rows, : columns // 32].repeat_interleave(32, 1)
    elif operand._is_2D_scaled:
        assert scales.dtype == torch.float32 and scales.shape == (rows // 128, _padded(columns // 128, 4))
        inverse = scales[:, : columns // 128].repeat_interleave(128, 0).repeat_interleave(128, 1)
    else:
        assert scales.dtype == torch.float32 and scales.shape == (columns // 128, _padded(rows, 4))
        inverse = scales.t()[:rows].repeat_interleave(128, 1)
    return data.view(FORMATS[operand._fp8_dtype]).float() * inverse


def _padded(size: int, multiple: int) -> int:
    return size + -size % multiple
