"""Arguments of torch's GEMM with scales of blocks: against its own checks, and against the layouts written out one by one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from triaxis.engine.config.schema.fp8 import Fp8Config
from triaxis.engine.errors import ConfigError
from triaxis.engine.kernels.fp8 import products
from triaxis.engine.kernels.fp8.block_product import block_product, in_tiles, scales_of
from triaxis.engine.kernels.fp8.products import Fp8, emulated_product, open_fp8
from triaxis.engine.kernels.fp8.recipes import RECIPES, Quantised

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SIZES = {"blockwise": (256, 384, 640), "mxfp8": (160, 96, 224)}
"""m, n and k of a product: of 640 / 128 scales three are padding, and of 224 / 32 one is; 160 and 96 rows are parts of tiles."""

pytestmark = pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="torch's scaled_mm is new in 2.10")


def operands(recipe: str) -> tuple[Fp8, list[tuple[Quantised, Quantised]]]:
    """The operands of a forward and of a weight's gradient; each block has another scale."""
    m, n, k = SIZES[recipe]
    fp8 = Fp8(RECIPES[recipe], "torch")  # type: ignore[index]
    generator = torch.Generator().manual_seed(2)
    a, b, g = (torch.randn(size, generator=generator).exp2() for size in ((m, k), (n, k), (n, k)))
    a, b, g = (x * torch.randint(-8, 8, x.shape, generator=generator).exp2() for x in (a, b, g))
    return fp8, [(fp8.activation(a, None), fp8.weight(b, None)), (fp8.gradient(g, None), fp8.activation(a, None))]


def at(scale: torch.Tensor, place: int) -> float:
    """The number of a scale tensor's memory at a place, an exponent as what it stands for."""
    memory = torch.as_strided(scale, (scale.untyped_storage().nbytes() // scale.element_size(),), (1,), 0)
    return float(memory[place].to(torch.float32))


def scale_in_memory(scale: torch.Tensor, scaling: Any, row: int, column: int, rows: int, columns: int) -> float:
    """The scale of an element of a matrix [rows, columns], read where cuBLASLt reads it."""
    if scaling == F.ScalingType.BlockWise1x128:
        return at(scale, column // 128 * rows + row)
    if scaling == F.ScalingType.BlockWise128x128:
        padded = -(-(columns // 128) // 4) * 4
        return at(scale, row // 128 * padded + column // 128)
    place = column // 32
    tile = row // 128 * -(-(columns // 32) // 4) + place // 4
    return at(scale, 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + place % 4)


def written_out(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scaling_a: Any,
    scale_b: torch.Tensor,
    scaling_b: Any,
    *,
    bias: torch.Tensor | None,
    output_dtype: torch.dtype,
    **swizzles: Any,
) -> torch.Tensor:
    """Compute the product of `scaled_mm`: a [m, k], b [k, n]."""
    wide = []
    for values, scale, scaling in ((a, scale_a, scaling_a), (b.t(), scale_b, scaling_b)):
        (rows, columns), step = values.shape, 32 if scaling == F.ScalingType.BlockWise1x32 else 128
        of_places = torch.tensor(
            [
                [scale_in_memory(scale, scaling, row, column, rows, columns) for column in range(0, columns, step)]
                for row in range(rows)
            ]
        )
        wide.append(values.to(torch.float32) * of_places.repeat_interleave(step, dim=1))
    total = wide[0] @ wide[1].t()
    return (total if bias is None else total + bias).to(output_dtype)


@pytest.mark.parametrize("recipe", SIZES)
def test_scales_lie_where_the_gemm_reads_them(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_mm", written_out)
    fp8, pairs = operands(recipe)
    for left, right in pairs:
        bias = torch.arange(len(right.values), dtype=torch.float32)
        got = fp8.product(left, right, bias, torch.float32)
        want = emulated_product(left, right, bias, torch.float32)
        terms = left.dequantised(torch.float32).abs() @ right.dequantised(torch.float32).abs().t()
        assert bool(((got - want).abs() <= 1e-5 * terms).all())


def on_a_pretended_gpu(*arguments: Any, **named: Any) -> torch.Tensor:
    """Call the real `scaled_mm` with tensors of these shapes and strides that have no memory: torch checks and computes nothing."""

    def pretended(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)

    with FakeTensorMode():
        return SCALED_MM(*map(pretended, arguments), **{name: pretended(value) for name, value in named.items()})


SCALED_MM: Callable[..., torch.Tensor] = getattr(F, "scaled_mm", torch.mm)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torch_s_checks_take_the_arguments(recipe: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_mm", on_a_pretended_gpu)
    _, pairs = operands(recipe)
    for left, right in pairs:
        made = block_product(left, right, None, dtype)
        assert made.shape == (len(left.values), len(right.values)) and made.dtype == dtype
        kinds = scales_of(left), scales_of(right)
        values = left.values, right.values.t()
        swizzles = [getattr(F.SwizzleType, kind.swizzle) for kind in kinds]
        scalings = [getattr(F.ScalingType, kind.scaling) for kind in kinds]
        with pytest.raises((RuntimeError, ValueError), match=r"must have|must be|should have"):
            # As they come: neither transposed nor padded nor in tiles.
            on_a_pretended_gpu(
                *values,
                left.inverse,
                scalings[0],
                right.inverse,
                scalings[1],
                swizzle_a=swizzles[0],
                swizzle_b=swizzles[1],
            )


def test_tiles_have_exponents_in_the_documented_order() -> None:
    rows, places = 160, 7
    exponents = torch.arange(rows * places).view(rows, places) % 200 - 100
    made = in_tiles(exponents.float().exp2()).view(torch.uint8)
    assert len(made) == 256 * 8
    expected = torch.zeros(256 * 8, dtype=torch.uint8)
    for row in range(rows):
        for place in range(places):
            tile = row // 128 * 2 + place // 4
            expected[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + place % 4] = exponents[row, place] + 127
    assert torch.equal(made, expected)


def test_what_is_not_finite_stays_so() -> None:
    made = in_tiles(torch.tensor([[torch.inf, torch.nan, 1.0]]))
    assert made[:3].to(torch.float32).isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("recipe", SIZES)
def test_the_trial_compares_products_with_the_emulation(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = Fp8(RECIPES[recipe], "torch")  # type: ignore[index]
    monkeypatch.setattr(F, "scaled_mm", written_out)
    products._try_products(fp8, torch.bfloat16, CPU)

    def in_another_order(*arguments: Any, **named: Any) -> torch.Tensor:
        a, b, scale_a, *others = arguments
        as_integers = scale_a.view(torch.uint8 if scale_a.element_size() == 1 else torch.int32)
        moved = torch.empty_strided(scale_a.shape, scale_a.stride(), dtype=as_integers.dtype)
        moved.copy_(as_integers.roll(1, 0))
        return written_out(a, b, moved.view(scale_a.dtype), *others, **named)

    monkeypatch.setattr(F, "scaled_mm", in_another_order)
    with pytest.raises(ValueError, match="not those of the rounded numbers"):
        products._try_products(fp8, torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("recipe", "capability", "words"),
    [
        ("blockwise", (8, 9), r"8\.9 has no GEMM with scales of these blocks; 9\.0 alone has"),
        ("blockwise", (10, 0), r"10\.0 has no GEMM with scales of these blocks; 9\.0 alone has"),
        ("mxfp8", (9, 0), r"9\.0 has no GEMM with scales of these blocks; 10\.0 is the first that has"),
    ],
)
def test_gpus_without_the_blocks_are_refused(
    recipe: Any, capability: tuple[int, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ConfigError, match=words):
        open_fp8(Fp8Config(recipe=recipe), torch.bfloat16, GPU)


def test_a_cpu_and_an_old_torch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="blocks on GPUs alone"):
        open_fp8(Fp8Config(recipe="mxfp8", backend="torch"), torch.bfloat16, CPU)
    monkeypatch.delattr(F, "scaled_mm")
    with pytest.raises(ConfigError, match=r"has no GEMM with scales of blocks; 2\.10 is the first"):
        open_fp8(Fp8Config(recipe="mxfp8", backend="torch"), torch.bfloat16, CPU)


@pytest.mark.parametrize(("recipe", "capability"), [("blockwise", (9, 0)), ("mxfp8", (10, 0)), ("mxfp8", (12, 0))])
def test_gpus_with_the_blocks_are_tried(
    recipe: Any, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    tried = []
    monkeypatch.setattr(products, "_try_products", lambda fp8, dtype, device: tried.append(fp8.recipe))
    fp8 = open_fp8(Fp8Config(recipe=recipe), torch.bfloat16, GPU)
    assert fp8 is not None and fp8.backend == "torch" and tried == [RECIPES[recipe]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bias_is_added_whatever_the_result_s_dtype(dtype: torch.dtype) -> None:
    fp8 = Fp8(RECIPES["tensorwise"], "torch")
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.arange(32, dtype=dtype)
    a, w = fp8.activation(x, None), fp8.weight(x, None)
    got, want = fp8.product(a, w, bias, dtype).float(), emulated_product(a, w, bias, dtype).float()
    assert float((got - want).abs().max()) <= 2 * torch.finfo(dtype).eps * float(want.abs().max())


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_gives_the_products_of_the_emulation_or_is_refused(recipe: Any) -> None:
    capability = torch.cuda.get_device_capability(GPU)
    has_blocks = {"tensorwise": capability >= (8, 9), "blockwise": capability[0] == 9, "mxfp8": capability >= (10, 0)}
    if has_blocks[recipe]:
        # The trial compares.
        assert open_fp8(Fp8Config(recipe=recipe), torch.bfloat16, GPU) is not None
    else:
        with pytest.raises(ConfigError, match="compute capability"):
            open_fp8(Fp8Config(recipe=recipe), torch.bfloat16, GPU)
