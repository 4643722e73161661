"""Products of FP8 operands: the emulation against sums in Python, torch's scaled GEMM against the emulation."""

import re
from typing import Any

import pytest
import torch

from triaxis.engine.config.schema.fp8 import Fp8Config
from triaxis.engine.errors import ConfigError
from triaxis.engine.kernels.fp8 import products
from triaxis.engine.kernels.fp8.products import Fp8, emulated_product, open_fp8, scaled_product
from triaxis.engine.kernels.fp8.recipes import E4M3, E5M2, RECIPES, Fp8Format, quantise

CPU = torch.device("cpu")


def matrices(m: int, n: int, k: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in ((m, k), (n, k), (n,))]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_emulation_multiplies_what_was_rounded(recipe: str) -> None:
    fp8 = Fp8(RECIPES[recipe], "emulated")  # type: ignore[index]
    a, b, bias = matrices(128, 128, 256, torch.float64)
    left, right = fp8.activation(a, None), fp8.weight(b, None)
    want = left.dequantised(torch.float64) @ right.dequantised(torch.float64).t() + bias
    got = fp8.product(left, right, bias, torch.float64)
    # One scale is applied to the sums, of numbers that are exact.
    assert float((got - want).abs().max()) < 1e-6
    exact = a @ b.t() + bias
    assert 0.005 < float((got - exact).norm() / exact.norm()) < 0.06


@pytest.mark.parametrize("left", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torch_s_scaled_gemm_gives_what_the_emulation_gives(left: Fp8Format, dtype: torch.dtype) -> None:
    a, b, _ = matrices(32, 48, 64, dtype)
    operands = [quantise(each, form, None, has_powers=False) for each, form in ((a, left), (b, E4M3))]
    got = scaled_product(*operands, None, dtype, is_fast=False).double()
    want = emulated_product(*operands, None, torch.float32).double()
    # Sums in fp32 in another order, and a result that is rounded to `dtype`.
    wide = [each.dequantised(torch.float64).abs() for each in operands]
    terms = torch.finfo(torch.float32).eps * (wide[0] @ wide[1].t())
    assert bool(((got - want).abs() <= 4 * terms + torch.finfo(dtype).eps * want.abs()).all())


@pytest.mark.parametrize(
    ("recipe", "form", "gradient"),
    [
        ("tensorwise", "auto", E5M2),
        ("tensorwise", "hybrid", E5M2),
        ("tensorwise", "e4m3", E4M3),
        ("blockwise", "auto", E4M3),
        ("mxfp8", "e4m3", E4M3),
    ],
)
def test_gradients_have_the_format_that_is_asked_for(recipe: Any, form: Any, gradient: Fp8Format) -> None:
    fp8 = open_fp8(Fp8Config(recipe=recipe, format=form, backend="emulated"), torch.bfloat16, torch.device("cpu"))
    assert fp8 is not None
    x = torch.randn(128, 128)
    assert fp8.gradient(x, None).values.dtype == gradient.dtype
    assert fp8.activation(x, None).values.dtype == fp8.weight(x, None).values.dtype == E4M3.dtype


def test_auto_is_the_emulation_on_a_cpu() -> None:
    fp8 = open_fp8(Fp8Config(), torch.bfloat16, CPU)
    assert fp8 is not None and fp8.backend == "emulated"
    assert open_fp8(None, torch.bfloat16, CPU) is None
    named = open_fp8(Fp8Config(backend="torch"), torch.bfloat16, CPU)
    assert named is not None and named.backend == "torch"


def test_a_backend_that_does_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **fields: object) -> torch.Tensor:
        raise NotImplementedError("'scaled_mm' is not made for this device.\nmore")

    monkeypatch.setattr(products, "scaled_product", refused)
    with pytest.raises(ConfigError, match=r"precision\.fp8=null") as caught:
        open_fp8(Fp8Config(backend="torch"), torch.bfloat16, CPU)
    assert re.search(r"tensorwise with backend torch does not run on cpu .*'scaled_mm' is not made", str(caught.value))


def test_a_gpu_before_ada_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"compute capability 8\.0 has no FP8; 8\.9 is the first"):
        open_fp8(Fp8Config(), torch.bfloat16, torch.device("cuda", 0))
