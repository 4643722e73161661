"""`general_gemm`, computed by torch in the accumulation dtype of its operands.

What the real one reads from raw pointers is contiguous, or it would read other numbers without an error: here that is an assertion.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from transformer_engine_torch import DType

from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

FORMATS = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}
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
    is_fp8 = isinstance(A, Float8TensorStorage)
    assert is_fp8 == isinstance(B, Float8TensorStorage)
    # The tensor cores of a Hopper take FP8 in this layout alone.
    assert not is_fp8 or (layout == "TN" and use_split_accumulator)
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
    assert operand.dim() == 2 and operand.is_contiguous()
    return operand if operand.dtype == torch.float64 else operand.float()
