"""Rotates queries and keys by RoPE, with frequencies that may be changed for longer contexts.

Formulas and defaults follow transformers' modeling_rope_utils.py. Pair i turns by base ** (-2 i / d) radians per position, where d
is the number of rotated elements per head.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from triaxis.engine.config.schema.layer_kinds import RopeScaling, Rotary
from triaxis.engine.kernels.fusion import Fusion
from triaxis.engine.numerics.precision import accumulate, accumulation_dtype

T = TypeVar("T")


def rope_tables(position_ids: torch.Tensor, frequencies: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Compute RoPE's cosines and sines (2104.09864, section 3.4.2) at the given positions.

    Args:
        position_ids: positions int64 [b, s]; rows may differ.
        frequencies: radians per position [r / 2], in the run's accumulation dtype.
        factor: multiplier for cosines and sines.

    Returns:
        Cosines, then sines, as [2, s, b, 1, r] in the frequencies' dtype. Dims i and i + r/2 have equal angles ("rotate half"). The
        first half's sines are negated.
    """
    angles = position_ids.t().to(frequencies.dtype).unsqueeze(-1) * frequencies
    # cos(-a) = cos(a) and sin(-a) = -sin(a), so one concatenation gives both tables.
    angles = torch.cat((-angles, angles), dim=-1).unsqueeze(2)
    tables = torch.stack((angles.cos(), angles.sin()))
    return tables if factor == 1.0 else tables.mul_(factor)


def apply_rope(x: torch.Tensor, tables: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    """Rotate each head's first r elements in x [s, b, heads, d], with tables from `rope_tables`."""
    return _Rope.apply(x, tables, fusion)


class _Rope(torch.autograd.Function):
    """Autograd function for `rope`, which saves only the tables."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tables: torch.Tensor, fusion: Fusion) -> torch.Tensor:
        ctx.fusion = fusion
        ctx.save_for_backward(tables)
        return fusion(rope)(x, tables)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (tables,) = ctx.saved_tensors
        return ctx.fusion(rope_backward)(grad, tables), None, None


def rope(x: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Compute y = x cos + swap(x) sin, where swap exchanges a head's halves.

    Shapes are as in `apply_rope`. `Fusion` can compile this function.
    """
    if x.shape[-1] != tables.shape[-1]:
        return _on_first(rope, x, tables)
    wide, (cos, sin) = accumulate(x), tables.unbind()
    return _swap(wide).mul_(sin).addcmul_(wide, cos).to(x.dtype)


def rope_(first: torch.Tensor, second: torch.Tensor, tables: torch.Tensor) -> None:
    """Compute `rope` in place, where each head's rotated elements are given as halves [s, b, heads, r / 2].

    Each element is read and written at its own place, so that one compiled kernel does it.
    """
    wide, other = accumulate(first), accumulate(second)
    (cos, other_cos), (sin, other_sin) = (table.chunk(2, dim=-1) for table in tables.unbind())
    turned, other_turned = (other * sin).addcmul_(wide, cos), (wide * other_sin).addcmul_(other, other_cos)
    first.copy_(turned)
    second.copy_(other_turned)


def rope_backward(grad: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Compute the gradient dx = dy cos + swap(dy sin), where swap exchanges a head's halves.

    `tables` holds cos and sin, from `rope_tables`.
    """
    if grad.shape[-1] != tables.shape[-1]:
        return _on_first(rope_backward, grad, tables)
    wide, (cos, sin) = accumulate(grad), tables.unbind()
    return _swap(wide * sin).addcmul_(wide, cos).to(grad.dtype)


def rope_backward_(grad: torch.Tensor, tables: torch.Tensor) -> None:
    """Compute `rope_backward` in place, where dy [s, b, heads, r] holds only the rotated elements.

    It computes dx = dy cos - swap(dy) sin, where swap exchanges a head's halves. This equals dy cos + swap(dy sin), because the
    halves of sin are -s and s. It needs one temporary less than `rope_backward`.
    """
    wide, (cos, sin) = accumulate(grad), tables.unbind()
    swapped = _swap(wide).mul_(sin)
    wide.mul_(cos).sub_(swapped)
    if wide is not grad:
        grad.copy_(wide)


def _on_first(
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, tables: torch.Tensor
) -> torch.Tensor:
    """Apply `rotate` to each head's first r elements, where r is the tables' last dim."""
    first, others = x.tensor_split((tables.shape[-1],), dim=-1)
    return torch.cat((rotate(first, tables), others), dim=-1)


def _swap(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)


def tables_by_rotary(
    rotaries: Iterable[Rotary | None], position_ids: torch.Tensor, dtype: torch.dtype
) -> dict[Rotary, torch.Tensor]:
    """Compute `rope_tables` for each distinct rotary at positions int64 [b, s], for a run in `dtype`."""
    wide, device = accumulation_dtype(dtype), position_ids.device
    return {
        rotary: rope_tables(position_ids, rotary_frequencies(rotary, wide, device), rotary_factor(rotary))
        for rotary in dict.fromkeys(rotaries)
        if rotary is not None
    }


def rotary_frequencies(rotary: Rotary, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Compute each pair's angle per position in radians, [d / 2] in `dtype` on the device."""
    exponents = torch.arange(0, rotary.dim, 2, device=device, dtype=dtype) / rotary.dim
    frequencies = rotary.base**-exponents
    if rotary.scaling is None:
        return frequencies
    return _RULES[rotary.scaling.type](frequencies, rotary, rotary.scaling)


def rotary_factor(rotary: Rotary) -> float:
    """Return the multiplier for cosines and sines; 1 without scaling."""
    return 1.0 if rotary.scaling is None else rotary.scaling.rotation_factor


def _linear(frequencies: torch.Tensor, rotary: Rotary, scaling: RopeScaling) -> torch.Tensor:
    """Divide all frequencies by `scaling.factor`, which extends the context by this factor (2306.15595)."""
    return frequencies / _given(scaling.factor)


def _llama3(frequencies: torch.Tensor, rotary: Rotary, scaling: RopeScaling) -> torch.Tensor:
    """Divide low frequencies by `factor`, keep high ones, and blend those in between (Llama 3.1)."""
    original = _given(scaling.original_max_position_embeddings)
    low, high, factor = (_given(each) for each in (scaling.low_freq_factor, scaling.high_freq_factor, scaling.factor))
    # Each pair's full turns in the original context; the blend is linear in them.
    turns = original * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * frequencies / factor + share * frequencies


def _yarn(frequencies: torch.Tensor, rotary: Rotary, scaling: RopeScaling) -> torch.Tensor:
    """Keep high frequencies, divide low ones by `factor`, and blend in between (YaRN, 2309.00071, section 3.2)."""

    def dim_with(turns: float) -> float:
        """Compute the fractional index of the pair that makes `turns` full turns in the original context."""
        original = _given(scaling.original_max_position_embeddings)
        return rotary.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rotary.base))

    first, last = dim_with(scaling.beta_fast or 32), dim_with(scaling.beta_slow or 1)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.dim - 1)
    last += 0.001 if first == last else 0  # no division by zero below
    pairs = torch.arange(rotary.dim // 2, device=frequencies.device, dtype=frequencies.dtype)
    slowed = ((pairs - first) / (last - first)).clamp(0, 1)
    return frequencies / _given(scaling.factor) * slowed + frequencies * (1 - slowed)


def _longrope(frequencies: torch.Tensor, rotary: Rotary, scaling: RopeScaling) -> torch.Tensor:
    """Divide each pair's frequency by its factor in `long_factor` if `rotary.is_long`, else in `short_factor`.

    LongRoPE (2402.13753).
    """
    divisors = scaling.long_factor if rotary.is_long else scaling.short_factor
    return frequencies / torch.tensor(_given(divisors), dtype=frequencies.dtype).to(frequencies.device)


_RULES: Mapping[str, Callable[[torch.Tensor, Rotary, RopeScaling], torch.Tensor]] = MappingProxyType(
    {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
)


def _given(value: T | None) -> T:
    assert value is not None, "the rules of the configuration require it"
    return value
