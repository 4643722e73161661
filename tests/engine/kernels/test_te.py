"""Transformer Engine's GEMMs by a stand-in: operands, layouts and FP8 numbers as they reach it, and words where it does not run."""

import importlib
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stand_in import stand_in
from triaxis.engine.config.quantities.attention_pattern import AttentionPattern
from triaxis.engine.config.schema.fp8 import Fp8Config, Fp8RecipeName
from triaxis.engine.config.schema.kernels import KernelsConfig
from triaxis.engine.errors import ConfigError
from triaxis.engine.kernels.attention import attention
from triaxis.engine.kernels.attention_trials import AttentionShape, attention_failure
from triaxis.engine.kernels.fp8.products import open_fp8
from triaxis.engine.kernels.masked_attention import Mask
from triaxis.engine.kernels.registry import Choices, device_trials, try_out
from triaxis.engine.kernels.te import TransformerEngine, gemm_failure, open_te
from triaxis.engine.kernels.te_attention import TeAttention
from triaxis.engine.program import ROOT

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, torch.bfloat16, CPU)
BY_TE = Choices("sdpa", "sdpa", "eager", "separate", "torch", linear="te")


@pytest.fixture
def te() -> Iterator[TransformerEngine]:
    with stand_in("te"):
        yield open_te()


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)


def test_three_gemms_of_a_layer(te: TransformerEngine) -> None:
    x, weight, bias, grad, total = random(6, 4), random(5, 4), random(5), random(6, 5), random(5, 4)
    before = total.clone()
    torch.testing.assert_close(te.forward(x, weight, bias), x @ weight.t() + bias)
    torch.testing.assert_close(te.input_grad(grad, weight), grad @ weight)
    onto = x.clone()
    assert te.input_grad(grad, weight, onto) is onto
    torch.testing.assert_close(onto, x + grad @ weight)
    assert te.add_weight_grad(total, grad, x, overwrite=False, with_total=False) is None
    torch.testing.assert_close(total, before + grad.t() @ x)
    of_bias = te.add_weight_grad(total, grad, x, overwrite=True, with_total=True)
    torch.testing.assert_close(total, grad.t() @ x)
    torch.testing.assert_close(of_bias, grad.sum(0))
    calls = importlib.import_module("transformer_engine.pytorch.cpp_extensions").calls
    assert calls[-5:] == ["TN", "NN", "NN", "NT", "NT"]


def test_sums_of_bf16_are_added_in_fp32(te: TransformerEngine) -> None:
    grad, x = random(64, 16, dtype=torch.bfloat16), random(64, 8, dtype=torch.bfloat16)
    total = torch.ones(16, 8)
    of_bias = te.add_weight_grad(total, grad, x, overwrite=False, with_total=True)
    torch.testing.assert_close(total, 1 + grad.float().t() @ x.float(), rtol=1e-6, atol=1e-5)
    assert of_bias is not None and of_bias.dtype == torch.float32
    torch.testing.assert_close(of_bias, grad.float().sum(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("recipe", "rows", "outputs", "inner"),
    [
        ("tensorwise", 32, 48, 64),
        ("blockwise", 256, 384, 640),
        ("blockwise", 128, 128, 128),
        ("mxfp8", 160, 32, 192),
    ],
)
def test_fp8_products_are_those_of_the_emulation(
    te: TransformerEngine, recipe: Fp8RecipeName, rows: int, outputs: int, inner: int, dtype: torch.dtype
) -> None:
    """Scales are padded for the one and read without padding; a matrix may be a single block."""
    by_te = open_fp8(Fp8Config(recipe=recipe, backend="te"), dtype, CPU)
    emulated = open_fp8(Fp8Config(recipe=recipe, backend="emulated"), dtype, CPU)
    assert by_te is not None and emulated is not None and by_te.te is not None
    # Every row and column has numbers of another size, so that each scale must meet its block.
    sizes = 2.0 ** (torch.arange(inner) // 32 % 5 - 2)
    a, b = random(rows, inner) * sizes * 2.0 ** (torch.arange(rows) % 3)[:, None], random(outputs, inner) / sizes
    a, b, bias = a.to(dtype), b.to(dtype), random(outputs, dtype=dtype)
    total = random(rows, outputs, dtype=torch.float32)
    found, wanted = [], []
    for fp8, into in ((by_te, found), (emulated, wanted)):
        left, right = fp8.gradient(a, None), fp8.weight(b.t().contiguous().t(), None)
        onto = total.clone()
        fp8.add_product(onto, left, fp8.activation(b, None), dtype, overwrite=False)
        into += [fp8.product(left, right, bias, dtype), fp8.product(left, right, None, dtype), onto]
    for one, other in zip(found, wanted, strict=True):
        tolerance = 2**-7 if one.dtype == torch.bfloat16 else 2e-6
        near = tolerance * float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=tolerance, atol=near)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_scales_in_another_order_are_refused(recipe: Fp8RecipeName, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in("te"):
        module = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
        right = module._in_blocks

        def in_another_order(operand: Any) -> torch.Tensor:
            operand._rowwise_scale_inv = operand._rowwise_scale_inv.flip(1)
            return right(operand)

        monkeypatch.setattr(module, "_in_blocks", in_another_order)
        with pytest.raises(ConfigError, match=r"backend te does not run on cpu here \(its products are not those of"):
            open_fp8(Fp8Config(recipe=recipe, backend="te"), torch.bfloat16, CPU)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_of_tokens_first(te: TransformerEngine, window: int | None) -> None:
    q, k, v = (random(2, heads, 8, 4) for heads in (4, 2, 2))
    by_te = TeAttention(te)
    found = by_te(q, k, v, window=window, scale=0.3)
    wanted = attention("blocks", q, k, v, Mask(window), is_causal=True, scale=0.3)
    torch.testing.assert_close(found, wanted)
    assert by_te(q, k, v, window=window, scale=0.3).shape == q.shape


def test_attention_is_tried_against_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = replace(SHAPE, pattern=AttentionPattern(windows=True))
    with stand_in("te"):
        assert attention_failure("te", SHAPE) == attention_failure("te", windows) == ""
        module = importlib.import_module("transformer_engine.pytorch.attention").DotProductAttention
        monkeypatch.setattr(module, "forward", lambda self, q, k, v: (q + 0 * k.sum() + 0 * v.sum()).flatten(2))
        assert attention_failure("te", SHAPE) == "its result or gradients are not those of attention"
    asked = KernelsConfig(attention="te")
    with pytest.raises(ConfigError, match=r"transformer-engine is not installed.*install it: Beside a torch with CUDA"):
        try_out(asked, replace(BY_TE, attention="te", linear="torch"), device_trials(SHAPE, torch.float32))
    assert "it has no sinks" in attention_failure("te", replace(SHAPE, pattern=AttentionPattern(sinks=True)))


def refusal() -> str:
    with pytest.raises(ConfigError) as caught:
        try_out(KernelsConfig(linear="te"), BY_TE, device_trials(SHAPE, torch.float32))
    (problem,) = caught.value.problems
    return str(problem)


def test_where_it_runs_it_is_taken() -> None:
    with stand_in("te"):
        chosen, notes = try_out(KernelsConfig(linear="te"), BY_TE, device_trials(SHAPE, torch.float32))
    assert (chosen, notes) == (BY_TE, [])


def test_without_the_package_it_is_refused() -> None:
    assert "kernels.linear = te does not run here, in bfloat16 on cpu" in refusal()
    assert "the package transformer-engine is not installed" in refusal()
    assert f"pip install --no-build-isolation -e '{ROOT}[te]'" in refusal() and "kernels.linear=torch" in refusal()
    with pytest.raises(
        ConfigError, match=r"backend te does not run on cpu here \(the package transformer-engine is not"
    ):
        open_fp8(Fp8Config(backend="te"), torch.bfloat16, CPU)


def package(folder: Path, general_gemm: str) -> None:
    """Write a transformer-engine 2.8.0 with this source of its function."""
    inner = folder / "old" / "transformer_engine" / "pytorch"
    (inner / "tensor" / "storage").mkdir(parents=True)
    for each in (inner.parent, inner, inner / "tensor", inner / "tensor" / "storage"):
        (each / "__init__.py").write_text('__version__ = "2.8.0"\n')
    (inner / "cpp_extensions.py").write_text(general_gemm)
    (inner / "attention.py").write_text("class DotProductAttention: ...\n")
    for file, name in (
        ("float8_tensor_storage", "Float8TensorStorage"),
        ("float8_blockwise_tensor_storage", "Float8BlockwiseQTensorStorage"),
        ("mxfp8_tensor_storage", "MXFP8TensorStorage"),
    ):
        (inner / "tensor" / "storage" / f"{file}.py").write_text(f"class {name}: ...\n")
    (folder / "old" / "transformer_engine_torch.py").write_text("class DType: kFloat8E4M3, kFloat8E5M2 = 7, 8\n")


ARGUMENTS = (
    "out_dtype=None, gelu=False, gelu_in=None, accumulate=False, layout='TN', out=None, bias=None, "
    "use_split_accumulator=False, grad=False"
)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            f"def general_gemm(A, B, workspace, {ARGUMENTS}): ...\n",
            r"general_gemm of transformer-engine 2.8.0 takes other arguments (a workspace that the caller must bring); 2.10 is",
        ),
        (
            "def general_gemm(A, B, layout='TN', out=None, bias=None, grad=False): ...\n",
            "(no out_dtype, no accumulate,",
        ),
        ("raise FileNotFoundError('Could not find shared object file: libtransformer_engine.so')\n", "libtransformer"),
        (
            f"def general_gemm(A, B, {ARGUMENTS}):\n    raise AssertionError('Torch not compiled with CUDA enabled')\n",
            "Torch not compiled with CUDA enabled",
        ),
        (
            f"def general_gemm(A, B, {ARGUMENTS}):\n"
            "    product = B @ A.t() + bias if layout == 'TN' else B @ A if layout == 'NN' else B.t() @ A\n"
            "    return product, None, None, None\n",
            "its gradient of the input is not torch's",
        ),
    ],
    ids=["a workspace", "fewer arguments", "no library", "no CUDA", "no accumulation"],
)
def test_one_that_does_not_fit_is_refused(tmp_path: Path, source: str, words: str) -> None:
    package(tmp_path, source)
    with stand_in("old", tmp_path):
        assert words in refusal()


def test_a_stand_in_is_gone_after_its_block() -> None:
    with stand_in("te"):
        assert not gemm_failure(torch.float32, torch.float32, CPU)
    assert not any(name.startswith("transformer_engine") for name in sys.modules)
    assert isinstance(sys.modules["torch"], types.ModuleType)
