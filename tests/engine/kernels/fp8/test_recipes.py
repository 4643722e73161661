"""Scales and rounding of FP8, against numbers listed one by one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triaxis.engine.kernels.fp8.recipes import (
    E4M3,
    E5M2,
    RECIPES,
    Fp8Format,
    Quantised,
    inverse_of,
    quantise,
    round_by,
    scale_of,
)


def numbers_of(exponent_bits: int, mantissa_bits: int, largest: float) -> list[float]:
    """Return all finite numbers of a format, from its definition."""
    bias = 2 ** (exponent_bits - 1) - 1
    found = [mantissa * 2.0 ** (1 - bias - mantissa_bits) for mantissa in range(2**mantissa_bits)]
    for exponent in range(1, 2**exponent_bits):
        found += [(1 + m / 2**mantissa_bits) * 2.0 ** (exponent - bias) for m in range(2**mantissa_bits)]
    return [number for number in found if number <= largest]


FORMATS = [(E4M3, numbers_of(4, 3, 448.0)), (E5M2, numbers_of(5, 2, 57344.0))]


@pytest.mark.parametrize(("form", "numbers"), FORMATS)
@given(st.floats(2.0**-18, 1.0, width=32))
def test_a_number_becomes_the_nearest_of_the_format(form: Fp8Format, numbers: list[float], value: float) -> None:
    # Largest 448 (57,344): the scale is 1, and the value is rounded as it is.
    x = torch.tensor([[value * form.largest, -value, form.largest]], dtype=torch.float64)
    got = quantise(x, form, None, has_powers=False).dequantised(torch.float64)
    for asked, found in zip(x[0].tolist(), got[0].tolist(), strict=True):
        least = min(abs(abs(asked) - number) for number in numbers)
        assert abs(found) in numbers
        assert abs(abs(asked) - abs(found)) == least
        assert found == 0 or math.copysign(1, found) == math.copysign(1, asked)


@pytest.mark.parametrize("form", [E4M3, E5M2])
@given(st.floats(1e-30, 1e30))
def test_powers_of_two_leave_room_of_less_than_a_factor_of_two(form: Fp8Format, largest: float) -> None:
    amax = torch.tensor(largest, dtype=torch.float32)
    scale = scale_of(amax, form, has_powers=True)
    assert math.frexp(float(scale))[0] == 0.5
    assert form.largest / 2 < float(amax) * float(scale) <= form.largest * (1 + 1e-6)


@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_powers_of_two_are_quotients_rounded_down(form: Fp8Format) -> None:
    """Try every exponent: the largest of the format itself, its neighbours on both sides, and numbers between."""
    bits = torch.arange(1, 255, dtype=torch.int32).unsqueeze(1) << 23
    places = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF], dtype=torch.int32)
    largest = (bits | places).view(torch.float32)
    mantissa, exponent = torch.frexp(form.largest / largest.double())
    wanted = torch.ldexp(torch.ones_like(mantissa), (exponent - 1).clamp(max=126))
    assert torch.equal(scale_of(largest, form, has_powers=True).double(), wanted)


def test_scales_of_zeros_tiny_numbers_and_infinities() -> None:
    for has_powers in (False, True):
        assert float(scale_of(torch.tensor(0.0), E4M3, has_powers=has_powers)) == 1.0
        assert scale_of(torch.tensor(1e-38), E4M3, has_powers=has_powers).isfinite()
        for bad in (torch.inf, torch.nan):
            made = quantise(torch.tensor([[1.0, bad]]), E4M3, None, has_powers=has_powers).dequantised(torch.float32)
            assert not made.isfinite().all(), "a step that is not finite must stay one"


@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])
def test_each_block_has_a_scale_of_its_own(name: str) -> None:
    recipe = RECIPES[name]  # type: ignore[index]
    for block in (recipe.activation_block, recipe.weight_block):
        assert block is not None
        r, c = block
        x = torch.randn(2 * r, 3 * c, generator=torch.Generator().manual_seed(3))
        x[:r, c : 2 * c] *= 2.0**20
        whole = quantise(x, E4M3, block, has_powers=True)
        assert whole.inverse.shape == (2, 3)
        for i in range(2):
            for j in range(3):
                part = x[i * r : (i + 1) * r, j * c : (j + 1) * c]
                alone = quantise(part, E4M3, block, has_powers=True)
                assert alone.inverse.item() == whole.inverse[i, j].item()
                error = (alone.dequantised(torch.float32) - part).abs() / part.abs().amax()
                assert float(error.max()) <= 2.0**-4, "half of the last of 3 bits, of a number near the largest"


def test_a_number_beyond_the_given_largest_is_the_largest_of_the_format() -> None:
    x = torch.tensor([[1.0, 8.0]])
    largest = torch.tensor(2.0)
    made = Quantised(round_by(x, largest, E4M3), inverse_of(largest, E4M3)).dequantised(torch.float32)
    assert made.tolist() == [[1.0, 2.0]]
