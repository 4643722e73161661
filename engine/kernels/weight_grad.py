"""Adds a weight's gradient to its main grad: dW += dY^T X.

    separate   a GEMM in the run's dtype into a new tensor, which a second pass adds to the main grad
    fused      a GEMM that adds to the main grad in the accumulation dtype (cuBLAS, 16-bit inputs, 32-bit output)

If the main grad has the run's dtype, both do the same GEMM.
"""

from typing import Literal

import torch

from triaxis.engine.kernels.trial import failure

WeightGradKernel = Literal["separate", "fused"]


def add(main_grad: torch.Tensor, grad: torch.Tensor, *, overwrite: bool) -> None:
    """Add grad to main_grad, or copy it there if `overwrite`."""
    if overwrite:
        main_grad.copy_(grad)
    else:
        main_grad.add_(grad)


def add_matmul(
    main_grad: torch.Tensor,
    grad: torch.Tensor,
    inputs: torch.Tensor,
    *,
    overwrite: bool,
    kernel: WeightGradKernel = "separate",
) -> None:
    """Add grad^T [rows, tokens] inputs [tokens, in] to main_grad [rows, in], or assign it if `overwrite`."""
    beta = 0 if overwrite else 1
    if main_grad.dtype == grad.dtype:
        main_grad.addmm_(grad.t(), inputs, beta=beta)
    elif kernel == "fused":
        torch.ops.aten.addmm.dtype_out(main_grad, grad.t(), inputs, main_grad.dtype, beta=beta, out=main_grad)
    else:
        add(main_grad, grad.t() @ inputs, overwrite=overwrite)


def weight_grad_failure(
    kernel: WeightGradKernel, dtype: torch.dtype, main_grad_dtype: torch.dtype, device: torch.device
) -> str:
    """Try the kernel on a small matrix; return torch's reason if it does not run, else ""."""
    grad, inputs = (torch.ones(16, 16, dtype=dtype, device=device) for _ in range(2))
    main_grad = torch.ones(16, 16, dtype=main_grad_dtype, device=device)
    return failure(lambda: add_matmul(main_grad, grad, inputs, overwrite=False, kernel=kernel))


def weight_grad_refusal(
    kernel: WeightGradKernel, dtype: torch.dtype, main_grad_dtype: torch.dtype, device: torch.device, reason: str
) -> str:
    """Write the config error for a named kernel that does not run here."""
    names = [str(each).removeprefix("torch.") for each in (dtype, main_grad_dtype)]
    return (
        f"kernels.weight_grad = {kernel} does not run here, with a GEMM of {names[0]} that adds to {names[1]} on "
        f"{device.type} (torch says: {reason}). Another kernel would have other speed and other bits than what was "
        "asked for. kernels.weight_grad=separate runs anywhere."
    )
