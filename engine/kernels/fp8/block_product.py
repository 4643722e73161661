"""Multiplies matrices with block scales, A B^T, by torch's scaled GEMM on GPUs.

The GEMM needs torch 2.10 or later. It reads these scales:

    block size   scales                                                                              GPUs
    1 x 128      fp32 [rows, columns / 128], dim 0 contiguous                                        Hopper
    128 x 128    fp32 [columns / 128, rows / 128], dim 0 contiguous and padded to a multiple of 4    Hopper
    1 x 32       exponents (e8m0), in tiles of 128 rows and 4 scales                                 Blackwell

A tile of 128 x 4 scales stores the scale at row r, column c at index 16 (r mod 32) + 4 (r div 32) + c. Tiles are ordered along the
contraction, then along the rows. These layouts are cuBLASLt's ("1D and 2D block scaling", "block scaling factors layout" in its
documentation).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F

from triaxis.engine.kernels.fp8.recipes import Quantised
from triaxis.engine.numerics.precision import MX_SCALE_DTYPE

TILE_ROWS, TILE_COLUMNS = 128, 4

_PADDED_TO = 4
"""128 x 128 scales along the contraction are padded to a multiple of this number."""

_SCALINGS: Mapping[tuple[int, int], str] = MappingProxyType(
    {(1, 128): "BlockWise1x128", (128, 128): "BlockWise128x128", (1, 32): "BlockWise1x32"}
)
"""A block's (rows, columns) -> name in `torch.nn.functional.ScalingType`."""


class Scales(NamedTuple):
    """A matrix's scales as torch's GEMM reads them.

    Attributes:
        tensor: factors from FP8 to real values, one per block.
        scaling: name in `ScalingType`.
        swizzle: name in `SwizzleType`.
    """

    tensor: torch.Tensor
    scaling: str
    swizzle: str


def has_block_gemm() -> bool:
    """Whether this torch has a GEMM with block scales."""
    return hasattr(F, "scaled_mm")


def block_product(a: Quantised, b: Quantised, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Compute A B^T + bias from fp32 sums.

    The shapes are a [m, k], b [n, k] with contiguous rows, bias [n] -> [m, n] in `dtype`.
    """
    of_a, of_b = scales_of(a), scales_of(b)
    return F.scaled_mm(
        a.values,
        b.values.t(),
        of_a.tensor,
        getattr(F.ScalingType, of_a.scaling),
        of_b.tensor,
        getattr(F.ScalingType, of_b.scaling),
        swizzle_a=getattr(F.SwizzleType, of_a.swizzle),
        swizzle_b=getattr(F.SwizzleType, of_b.swizzle),
        bias=bias,
        output_dtype=dtype,
    )


def scales_of(matrix: Quantised) -> Scales:
    """Arrange a matrix's scales in the layout for its block size."""
    (rows, columns), (down, across) = matrix.values.shape, matrix.inverse.shape
    block = rows // down, columns // across
    if block == (1, 32):
        return Scales(in_tiles(matrix.inverse), _SCALINGS[block], "SWIZZLE_32_4_4")
    if block == (1, 128):
        return Scales(matrix.inverse.t().contiguous().t(), _SCALINGS[block], "NO_SWIZZLE")
    padded = F.pad(matrix.inverse, (0, -across % _PADDED_TO))
    return Scales(padded.contiguous().t(), _SCALINGS[block], "NO_SWIZZLE")


def in_tiles(inverse: torch.Tensor) -> torch.Tensor:
    """Convert power-of-two scales [rows, columns / 32] to a zero-padded exponent vector in the GEMM's tile order."""
    exponents = padded_exponents(inverse)
    tiles = exponents.view(-1, TILE_ROWS // 32, 32, exponents.shape[1] // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(MX_SCALE_DTYPE)


def padded_exponents(inverse: torch.Tensor) -> torch.Tensor:
    """Convert power-of-two scales [rows, columns / 32] to exponents (bytes), zero-padded to whole tiles."""
    down, across = inverse.shape
    # Some devices cannot copy e8m0, but all can copy bytes.
    return F.pad(inverse.to(MX_SCALE_DTYPE).view(torch.uint8), (0, -across % TILE_COLUMNS, 0, -down % TILE_ROWS))
