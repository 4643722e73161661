"""Compiled rounding, largest values and transposition: the bits of the plain operators."""

from collections.abc import Iterator

import pytest
import torch
import torch._inductor

from tests.harness import compiler
from tests.parity.cases import Case
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.kernels.fp8.recipes import (
    E4M3,
    E5M2,
    RECIPES,
    Fp8Format,
    inverse_of,
    quantise,
    round_both_ways,
    round_by,
    tensor_scale,
)
from triaxis.engine.kernels.fusion import EAGER, Fusion
from triaxis.engine.kernels.registry import open_kernels
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid

Block = tuple[int, int] | None

SHAPES = [(128, 256), (384, 128)]


def matrices(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Matrices with a scale of its own in each block, some transposed; one has a NaN, one zeros alone."""
    generator = torch.Generator().manual_seed(5)
    for shape in SHAPES:
        x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(4).exp2()
        yield x.to(dtype)
        yield x.to(dtype).t()
    broken = torch.ones(SHAPES[0], dtype=dtype)
    broken[3, 5] = torch.nan
    yield broken
    yield torch.zeros(SHAPES[0], dtype=dtype)


def check(name: str, into: Fp8Format, block: Block, dtype: torch.dtype, fusion: Fusion) -> None:
    recipe = RECIPES[name]  # type: ignore[index]
    for x in matrices(dtype):
        plain, made = (quantise(x, into, block, has_powers=recipe.has_powers, fusion=each) for each in (EAGER, fusion))
        assert made.values.is_contiguous() and plain.values.is_contiguous()
        assert made.values.dtype == plain.values.dtype
        for one, other in ((made.values, plain.values), (made.inverse, plain.inverse)):
            # A NaN has any sign.
            assert torch.allclose(one.to(torch.float32), other.to(torch.float32), rtol=0, atol=0, equal_nan=True)


@compiler()
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", RECIPES)
def test_compiled_rounding_has_the_bits_of_the_operators(name: str, dtype: torch.dtype) -> None:
    recipe, fusion = RECIPES[name], Fusion("compiled")  # type: ignore[index]
    operands = {
        (E4M3, recipe.activation_block),
        (E4M3, recipe.weight_block),
        (recipe.gradient, recipe.activation_block),
    }
    for into, block in operands:
        check(name, into, block, dtype, fusion)


@pytest.mark.parametrize("form", ["eager", "compiled"])
def test_rounding_has_the_form_of_the_run_s_elementwise_functions(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One object compiles for both, as the run asks for it."""
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, **options: graph)
    config = with_value(Case("llama", fp8="tensorwise").config(), "kernels.elementwise", form)
    topology = Topology(RankGrid(ParallelSizes()), 0, torch.device("cpu"))
    kernels = open_kernels(config, topology, is_alone=True)
    assert kernels.fp8 is not None and kernels.fp8.fusion is kernels.fusion and kernels.fusion.form == form


@compiler()
def test_compiled_rounding_of_a_tensor_with_one_scale() -> None:
    """Its scale, a transposed gradient, and both ways at once."""
    x, fusion = next(matrices(torch.bfloat16)), Fusion("compiled")
    largest, inverse = fusion(tensor_scale)(x, E5M2)
    assert largest == x.abs().max() and torch.equal(inverse, inverse_of(largest, E5M2))
    rounded, transposed = fusion(round_both_ways)(x, largest, E5M2)
    plain = round_by(x, largest, E5M2).view(torch.uint8)
    assert rounded.is_contiguous() and transposed.is_contiguous()
    alone = fusion(round_by)(x.t(), largest, E5M2)
    for one, other in ((rounded, plain), (transposed, plain.t()), (alone, plain.t())):
        assert torch.equal(one.view(torch.uint8), other)
