"""What adds a weight's gradient to its main grad: each kernel against a float64 product."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from triaxis.engine.kernels.weight_grad import add_matmul, weight_grad_failure, weight_grad_refusal

TOKENS, ROWS, IN = 24, 6, 10


@pytest.fixture
def gemm_of_a_gpu() -> Iterator[list[torch.Tensor]]:
    """The CPU gets the operator that only CUDA has, by its definition; yields the outputs that it wrote to."""
    written: list[torch.Tensor] = []

    def addmm(
        base: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        dtype: torch.dtype,
        *,
        beta: float = 1,
        alpha: float = 1,
        out: torch.Tensor,
    ) -> torch.Tensor:
        assert base.dtype == out.dtype == dtype and left.dtype == right.dtype
        written.append(out)
        return torch.addmm(base, left.to(dtype), right.to(dtype), beta=beta, alpha=alpha, out=out)

    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", addmm, "CPU")
    yield written
    library._destroy()


def product(kernel: Any, dtype: torch.dtype, wide: torch.dtype, device: str, overwrite: bool) -> tuple[Any, Any]:
    """(found, wanted): a main grad of ones, or of nan that must be written over, after one gradient."""
    generator = torch.Generator().manual_seed(2)
    grad, inputs = (torch.randn(TOKENS, n, generator=generator, dtype=torch.float64) for n in (ROWS, IN))
    main_grad = torch.full((ROWS, IN), torch.nan if overwrite else 1.0, dtype=wide, device=device)
    narrow = [tensor.to(device, dtype) for tensor in (grad, inputs)]
    add_matmul(main_grad, *narrow, overwrite=overwrite, kernel=kernel)
    return main_grad.double().cpu(), narrow[0].double().t().cpu() @ narrow[1].double().cpu() + (0 if overwrite else 1)


@pytest.mark.parametrize("overwrite", [False, True])
def test_separate_and_one_dtype(overwrite: bool) -> None:
    for kernel in ("separate", "fused"):
        found, wanted = product(kernel, torch.float64, torch.float64, "cpu", overwrite)
        torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)
    found, wanted = product("separate", torch.bfloat16, torch.float32, "cpu", overwrite)
    assert float((found - wanted).norm() / wanted.norm()) < 3e-3  # the product was rounded to bf16


@pytest.mark.parametrize("overwrite", [False, True])
def test_fused_rounds_nothing_to_the_dtype_of_the_run(gemm_of_a_gpu: list[torch.Tensor], overwrite: bool) -> None:
    assert not weight_grad_failure("fused", torch.bfloat16, torch.float32, torch.device("cpu"))
    found, wanted = product("fused", torch.bfloat16, torch.float32, "cpu", overwrite)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert len(gemm_of_a_gpu) == 2


def test_fused_where_no_library_has_it_is_refused() -> None:
    given = (torch.bfloat16, torch.float32, torch.device("cpu"))
    reason = weight_grad_failure("fused", *given)
    assert reason
    message = weight_grad_refusal("fused", *given, reason)
    assert re.search(r"weight_grad = fused does not run here.*bfloat16.*float32 on cpu", message)
    assert "weight_grad=separate runs anywhere" in message


@pytest.mark.gpu
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kernel", ["separate", "fused"])
def test_kernels_of_a_gpu(kernel: str, overwrite: bool) -> None:
    assert not weight_grad_failure(kernel, torch.bfloat16, torch.float32, torch.device("cuda"))  # type: ignore[arg-type]
    found, wanted = product(kernel, torch.bfloat16, torch.float32, "cuda", overwrite)
    assert float((found - wanted).norm() / wanted.norm()) < (1e-5 if kernel == "fused" else 3e-3)
