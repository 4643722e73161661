"""Frequencies of RoPE, and their changes for longer contexts.

Formulas and defaults are those of transformers' modeling_rope_utils.py; papers are named below. d is the number of elements that
rotate; pair i turns by base ** (-2 i / d) radians per position.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

import torch

from engine.config.attention_kinds import RopeScaling, Rotary
from engine.kernels.elementwise import rope_tables
from engine.numerics.precision import accumulation_dtype

T = TypeVar("T")


def tables_by_rotary(
    rotaries: Iterable[Rotary | None], position_ids: torch.Tensor, dtype: torch.dtype
) -> dict[Rotary, torch.Tensor]:
    """Return the table of `rope_tables` for each distinct record, at positions int64 [b, s], for a run in `dtype`."""
    wide, device = accumulation_dtype(dtype), position_ids.device
    return {
        rotary: rope_tables(position_ids, rotary_frequencies(rotary, wide, device), rotary_factor(rotary))
        for rotary in dict.fromkeys(rotaries)
        if rotary is not None
    }


def rotary_frequencies(rotary: Rotary, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the angle per position of each pair [d / 2], computed in `dtype` on the device."""
    exponents = torch.arange(0, rotary.dim, 2, device=device, dtype=dtype) / rotary.dim
    frequencies = rotary.base**-exponents
    if rotary.scaling is None:
        return frequencies
    return _RULES[rotary.scaling.type](frequencies, rotary, rotary.scaling)


def rotary_factor(rotary: Rotary) -> float:
    """Return the factor on cosines and sines: that of YaRN (2309.00071, section 3.4) and LongRoPE (2402.13753), else 1."""
    scaling = rotary.scaling
    if scaling is None or scaling.type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    factor = _given(scaling.factor)
    if factor <= 1:
        return 1.0
    if scaling.type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(_given(scaling.original_max_position_embeddings)))
    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return 0.1 * math.log(factor) + 1
    return (0.1 * scaling.mscale * math.log(factor) + 1) / (0.1 * scaling.mscale_all_dim * math.log(factor) + 1)


def _linear(frequencies: torch.Tensor, rotary: Rotary, scaling: RopeScaling) -> torch.Tensor:
    """Return positions that are `factor` times as dense (2306.15595)."""
    return frequencies / _given(scaling.factor)


def _llama3(frequencies: torch.Tensor, rotary: Rotary, scaling: RopeScaling) -> torch.Tensor:
    """Return long waves slowed down by `factor`, short ones as they are, and those between blended (Llama 3.1)."""
    original = _given(scaling.original_max_position_embeddings)
    low, high, factor = (_given(each) for each in (scaling.low_freq_factor, scaling.high_freq_factor, scaling.factor))
    turns = original * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * frequencies / factor + share * frequencies


def _yarn(frequencies: torch.Tensor, rotary: Rotary, scaling: RopeScaling) -> torch.Tensor:
    """Return fast dims as they are, slow ones slowed down by `factor`, and those between blended (2309.00071, section 3.2)."""

    def dim_with(turns: float) -> float:
        """Return the pair that turns so often in an original context."""
        original = _given(scaling.original_max_position_embeddings)
        return rotary.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rotary.base))

    first, last = dim_with(scaling.beta_fast or 32), dim_with(scaling.beta_slow or 1)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.dim - 1)
    last += 0.001 if first == last else 0
    pairs = torch.arange(rotary.dim // 2, device=frequencies.device, dtype=frequencies.dtype)
    slowed = ((pairs - first) / (last - first)).clamp(0, 1)
    return frequencies / _given(scaling.factor) * slowed + frequencies * (1 - slowed)


def _longrope(frequencies: torch.Tensor, rotary: Rotary, scaling: RopeScaling) -> torch.Tensor:
    """Return each pair slowed down by a number of its own, found by search for short and for long samples (2402.13753)."""
    divisors = scaling.long_factor if rotary.is_long else scaling.short_factor
    return frequencies / torch.tensor(_given(divisors), dtype=frequencies.dtype).to(frequencies.device)


_RULES: Mapping[str, Callable[[torch.Tensor, Rotary, RopeScaling], torch.Tensor]] = MappingProxyType(
    {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
)


def _given(value: T | None) -> T:
    assert value is not None, "the rules of the configuration require it"
    return value
