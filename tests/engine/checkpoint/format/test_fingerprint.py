"""The fingerprint: equal to its definition, blind to layouts, and different when anything else changes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.checkpoint.samples import Cut, cuts, dtypes, shapes, shard
from triaxis.engine.checkpoint.format.boxes import flat_boxes
from triaxis.engine.checkpoint.format.fingerprint import _weighted_sum, combine, describe, range_fingerprint, to_text
from triaxis.engine.numerics.hashing import key64, unsigned

WORD = 1 << 64
SIGNED = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def mixed(key: str, index: int) -> int:
    """An odd number from splitmix64, in integers of any size."""
    z = (unsigned(key64(key)) + (index + 1) * 0x9E3779B97F4A7C15) % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return (z ^ (z >> 31)) | 1


def defined(values: torch.Tensor, name: str, kind: str) -> int:
    """The module's formula, element by element."""
    num_columns = values.shape[-1] if values.dim() else 1
    total = 0
    for index, pattern in enumerate(values.contiguous().view(-1).view(SIGNED[values.dtype]).tolist()):
        row, column = divmod(index, num_columns)
        word = pattern
        if values.element_size() == 8:
            word ^= (pattern % WORD) >> 32
        total += (word + 0x9E3779B97F4A7C15) * mixed(f"{kind}:{name}:row", row) * mixed(f"{kind}:{name}:column", column)
    return total % WORD


def of_cut(values: torch.Tensor, cut: Cut) -> int:
    part = shard("w", values, cut)
    return range_fingerprint(part.values, part.name, part.kind, part.shape, part.box, part.start)


def of_whole(values: torch.Tensor) -> int:
    return of_cut(values, (tuple((0, size) for size in values.shape), 0, values.numel()))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.randn(draw(shapes), generator=generator, dtype=torch.float64).to(draw(dtypes))


@settings(max_examples=100, deadline=None)
@given(tensors().flatmap(lambda values: st.tuples(st.just(values), cuts(tuple(values.shape)))))
def test_every_layout_gives_the_number_of_the_definition(case: tuple[torch.Tensor, list[Cut]]) -> None:
    values, layout = case
    assert combine(of_cut(values, cut) for cut in layout) == defined(values, "w", "master") == of_whole(values)


@pytest.mark.parametrize("chunk_numel", [1, 50, 64, 1000, 2**20])
@pytest.mark.parametrize(
    "cut",
    [
        (((0, 30), (0, 128)), 0, 30 * 128),
        (((0, 30), (64, 128)), 17, 30 * 64 - 5),
        (((7, 9), (0, 128)), 3, 250),
    ],
)
def test_chunks_of_any_size_give_the_same_number(chunk_numel: int, cut: Cut) -> None:
    values = torch.randn(30, 128, generator=torch.Generator().manual_seed(0))
    part = shard("w", values, cut)
    parts = [box for box, _ in flat_boxes(*cut)]
    assert _weighted_sum(part.values, "master:w", part.shape, parts, chunk_numel) == of_cut(values, cut)


@settings(max_examples=60, deadline=None)
@given(tensors(), st.data())
def test_one_flipped_bit_is_seen(values: torch.Tensor, data: st.DataObject) -> None:
    raw = values.clone().view(-1).view(torch.uint8)
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    assert of_whole(raw.view(values.dtype).view(values.shape)) != of_whole(values)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 29), st.integers(0, 29))
def test_two_elements_that_change_places_are_seen(one: int, other: int) -> None:
    values = torch.arange(30, dtype=torch.float64)
    swapped = values.clone()
    swapped[one], swapped[other] = values[other], values[one]
    assert (of_whole(swapped) == of_whole(values)) == (one == other)


def test_name_and_kind_are_in_it() -> None:
    values = torch.ones(5)
    box = ((0, 5),)
    numbers = {
        range_fingerprint(values, name, kind, (5,), box, 0)
        for name in ("a", "b")
        for kind in ("master", "exp_avg", "exp_avg_sq")
    }
    assert len(numbers) == 6


def test_zeros_of_both_signs_and_nans_are_told_apart() -> None:
    patterns = [torch.tensor([value]) for value in (0.0, -0.0, math.nan)]
    patterns.append(torch.from_numpy(np.array([0x7FC00001], dtype=np.uint32).view(np.float32)))
    assert len({of_whole(values) for values in patterns}) == 4


def test_it_never_changes() -> None:
    """Numbers of released checkpoints and logs are compared with today's."""
    values = torch.arange(24, dtype=torch.float64).view(2, 3, 4)
    assert to_text(of_whole(values)) == GOLDEN_FLOAT64
    assert describe({"master": to_text(of_whole(values.bfloat16()))}) == f"master {GOLDEN_BFLOAT16}"


GOLDEN_FLOAT64 = "870c2f9a3839d1f0"
GOLDEN_BFLOAT16 = "898a727c2bc389f0"
