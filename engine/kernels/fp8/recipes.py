"""Quantises matrices to FP8 by a recipe, which sets the formats and the blocks that share a scale.

    recipe       activations, gradients         weights                 gradients' format   scale
    tensorwise   one scale for the tensor       one for the tensor      e5m2, or e4m3       format's maximum / amax, in fp32
    blockwise    1 x 128 along the contraction  128 x 128               e4m3                a power of two
    mxfp8        1 x 32 along the contraction   1 x 32                  e4m3                a power of two

Activations and weights are in e4m3, which has 3 mantissa bits and a maximum of 448. e5m2 has 2 mantissa bits and a maximum of
57,344 (2209.05433, table 1). `tensorwise` computes the scale from the tensor's present values. `blockwise` is DeepSeek-V3's
(2412.19437, section 3.3.2), with scales rounded to powers of two. `mxfp8` is the OCP Microscaling format (2310.10537). Its stored
scales are inverse, and rounded up so that no value overflows (2506.08027).

Each GEMM computes A B^T from matrices that are quantised along their rows, the contracted dim:

    forward                 Y [n, out]    = X [n, in] (W [out, in])^T
    gradient of the input   dX [n, in]    = dY [n, out] (W^T [in, out])^T
    gradient of the weight  dW [out, in]  = dY^T [out, n] (X^T [in, n])^T
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch

from triaxis.engine.config.schema.fp8 import BLOCKS, Fp8Config, Fp8RecipeName
from triaxis.engine.kernels.fusion import EAGER, Fusion
from triaxis.engine.numerics.precision import FP8_E4M3, FP8_E5M2, SCALE_DTYPE, accumulate

_MANTISSA_BITS = 23
_EXPONENT_BITS = 0xFF << _MANTISSA_BITS
_BITS_OF_1 = 127 << _MANTISSA_BITS
"""fp32 read as integers: mantissa bit count, exponent mask, and the bits of 1.0."""


class Fp8Format(NamedTuple):
    """An FP8 format: its dtype and its largest finite number."""

    dtype: torch.dtype
    largest: float

    @property
    def largest_bits(self) -> int:
        """The fp32 bits of `largest`, the format's largest finite number, as an integer."""
        return int.from_bytes(struct.pack("<f", self.largest), "little")


E4M3 = Fp8Format(FP8_E4M3, 448.0)
E5M2 = Fp8Format(FP8_E5M2, 57344.0)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Operand formats and scales.

    Attributes:
        gradient: format of output gradients; inputs and weights are always in e4m3.
        activation_block: (rows, columns) in inputs or gradients that share a scale; None for the whole tensor.
        weight_block: (rows, columns) in a weight that share a scale; None for the whole tensor.
        has_powers: whether scales are rounded down to powers of two.
    """

    gradient: Fp8Format
    activation_block: tuple[int, int] | None
    weight_block: tuple[int, int] | None
    has_powers: bool

    @property
    def is_tensorwise(self) -> bool:
        """Whether a tensor has one scale, on which all ranks that hold its parts must agree."""
        return self.activation_block is None


RECIPES: Mapping[Fp8RecipeName, Recipe] = MappingProxyType(
    {
        "tensorwise": Recipe(E5M2, None, None, has_powers=False),
        "blockwise": Recipe(E4M3, (1, BLOCKS["blockwise"]), (BLOCKS["blockwise"],) * 2, has_powers=True),
        "mxfp8": Recipe(E4M3, (1, BLOCKS["mxfp8"]), (1, BLOCKS["mxfp8"]), has_powers=True),
    }
)


def recipe_of(config: Fp8Config) -> Recipe:
    """Look up a run's recipe, with gradients in the configured format."""
    recipe = RECIPES[config.recipe]
    return replace(recipe, gradient=E4M3) if config.format == "e4m3" else recipe


@dataclass(frozen=True, slots=True)
class Quantised:
    """An FP8 matrix with its scales.

    Attributes:
        values: FP8 numbers [rows, columns].
        inverse: factors from FP8 to real values, fp32 [rows / r, columns / c] for r x c blocks.
    """

    values: torch.Tensor
    inverse: torch.Tensor

    def write(self, other: "Quantised") -> None:
        """Copy another matrix of these shapes into this one."""
        self.values.copy_(other.values)
        self.inverse.copy_(other.inverse)

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """Multiply the values by their factors: [rows, columns] in a wider dtype."""
        (rows, columns), (down, across) = self.values.shape, self.inverse.shape
        blocks = self.values.to(dtype).view(down, rows // down, across, columns // across)
        return (blocks * self.inverse.to(dtype)[:, None, :, None]).view(rows, columns)


class TensorScale(NamedTuple):
    """The one scale of a tensor.

    Attributes:
        largest: the tensor's largest absolute value, a scalar in the scales' dtype.
        inverse: the factor from FP8 to real values, [1, 1] in the scales' dtype.
    """

    largest: torch.Tensor
    inverse: torch.Tensor


def amax(x: torch.Tensor) -> torch.Tensor:
    """Compute a tensor's largest absolute value, a scalar in the scales' dtype."""
    return x.abs().amax().to(SCALE_DTYPE)


def inverse_of(largest: torch.Tensor, into: Fp8Format) -> torch.Tensor:
    """Compute the factor [1, 1] from FP8 to real values for a tensor with amax `largest`."""
    return scale_of(largest.view(1, 1), into, has_powers=False).reciprocal()


def tensor_scale(x: torch.Tensor, into: Fp8Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `TensorScale`'s fields for a tensor."""
    largest = amax(x)
    return largest, inverse_of(largest, into)


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """Copy a matrix to contiguous rows, as a GEMM reads them."""
    return x.contiguous()


def scale_of(largest: torch.Tensor, into: Fp8Format, *, has_powers: bool) -> torch.Tensor:
    """Compute the factor that maps numbers up to `largest` to a format's range.

    `largest` has any shape and the scales' dtype. The factor is 1 for `largest` = 0 and finite for tiny values. With `has_powers`
    it is rounded down to a power of two. If `largest` is infinite or NaN, numbers quantised with the factor dequantise to NaN.
    """
    if not has_powers:
        scale = (into.largest / largest).clamp(max=torch.finfo(SCALE_DTYPE).max)
        return torch.where(largest == 0, torch.ones_like(scale), scale)
    # To round a quotient down to a power of two, subtract the operands' fp32 bits and clear the mantissa. This is exact, unlike a
    # division on a GPU. The clamp bounds the factor by 2^126, whose reciprocal is not subnormal.
    bits = largest.view(torch.int32)
    powers = ((into.largest_bits - bits).clamp(max=126 << _MANTISSA_BITS) + _BITS_OF_1) & _EXPONENT_BITS
    powers = torch.where(bits == 0, _BITS_OF_1, powers).view(SCALE_DTYPE)
    return torch.where(largest.isfinite(), powers, torch.nan)


def quantise(
    x: torch.Tensor,
    into: Fp8Format,
    block: tuple[int, int] | None,
    *,
    has_powers: bool,
    fusion: Fusion = EAGER,
) -> Quantised:
    """Round a matrix to FP8, with scales of its own.

    Args:
        x: matrix [rows, columns] in any dtype; both sizes are multiples of the block's.
        into: target format.
        block: (rows, columns) that share a scale; None for the whole matrix.
        has_powers: whether scales are rounded down to powers of two.
        fusion: runner for the rounding.
    """
    return Quantised(*fusion(round_to_fp8)(x, into, block, has_powers))


def round_to_fp8(
    x: torch.Tensor, into: Fp8Format, block: tuple[int, int] | None, has_powers: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `Quantised`'s fields, with contiguous values. Arguments are as in `quantise`."""
    rows, columns = x.shape
    # Block (i, j) is blocks[i, :, j, :], so one reduction over dims 1 and 3 gives all scales.
    r, c = block or (rows, columns)
    blocks = x.reshape(rows // r, r, columns // c, c)
    scale = scale_of(blocks.abs().amax((1, 3)).to(SCALE_DTYPE), into, has_powers=has_powers)
    values = _scaled(blocks, scale[:, None, :, None], into)
    return values.view(rows, columns).contiguous(), scale.reciprocal()


def round_by(x: torch.Tensor, largest: torch.Tensor, into: Fp8Format) -> torch.Tensor:
    """Round a matrix [rows, columns] of a tensor with amax `largest` to FP8, with contiguous rows."""
    return _scaled(x, scale_of(largest, into, has_powers=False), into).contiguous()


def round_both_ways(x: torch.Tensor, largest: torch.Tensor, into: Fp8Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix as `round_by`, and return it and its transpose [columns, rows], from one pass over memory if compiled."""
    values = round_by(x, largest, into)
    return values, values.t().contiguous()


def _scaled(x: torch.Tensor, scale: torch.Tensor, into: Fp8Format) -> torch.Tensor:
    # Numbers beyond the range become the largest, not an infinity; NaN stays NaN.
    return (accumulate(x) * scale).clamp(-into.largest, into.largest).to(into.dtype)


def is_bytes(x: torch.Tensor) -> bool:
    """Whether a tensor holds FP8 numbers as bytes, the form that is sent and saved."""
    return x.dtype == torch.uint8


def from_bytes(x: torch.Tensor, into: Fp8Format, scale: TensorScale | None) -> Quantised:
    """View bytes [rows, columns] as FP8 numbers of a tensor with this scale."""
    assert scale is not None, "numbers that share no scale are not kept as bytes"
    return Quantised(x.view(into.dtype), scale.inverse)
