"""The fingerprint: equal to its definition, blind to layouts, and different when anything else changes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint import fingerprint as module
from engine.checkpoint.boxes import flat_boxes
from engine.checkpoint.fingerprint import combine, describe, range_fingerprint, run_starts, to_text
from engine.mix64 import key64, unsigned
from engine.shard_spec import box_runs
from tests.engine.checkpoint.samples import Cut, cuts, dtypes, shapes, shard

WORD = 1 << 64
SIGNED = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def folded(z: int) -> int:
    """Multiply and fold, in integers of any size."""
    z = z * 0xBF58476D1CE4E5B9 % WORD
    return z ^ (z >> 32)


def defined(values: torch.Tensor, name: str, kind: str) -> int:
    """The module's formula, element by element."""
    key = unsigned(key64(f"{kind}:{name}"))
    patterns = values.contiguous().view(-1).view(SIGNED[values.dtype]).tolist()
    return (
        sum(
            folded((key + (index + 1) * 0x9E3779B97F4A7C15) % WORD ^ pattern % WORD)
            for index, pattern in enumerate(patterns)
        )
        % WORD
    )


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "cut",
    [
        (((0, 300), (0, 128)), 0, 300 * 128),  # one run, longer than a chunk
        (((0, 300), (64, 128)), 17, 300 * 64 - 5),  # many short runs
        (((7, 9), (0, 128)), 3, 250),
    ],
)
def test_devices_agree(dtype: torch.dtype, cut: Cut) -> None:
    """NumPy's path on a CPU and torch's on accelerators, in chunks of several sizes."""
    values = torch.randn(300, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    part = shard("w", values, cut)
    parts = [box for box, _ in flat_boxes(*cut)]
    bits = part.values.view(SIGNED[dtype])
    expected = of_cut(values, cut)
    for chunk_numel in (64, 1000, 2**20):
        assert module._sum_on_device(bits, part.shape, parts, key64("master:w"), chunk_numel) == expected


@settings(max_examples=100, deadline=None)
@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), cuts(shape))))
def test_runs_are_those_of_the_record(case: tuple[tuple[int, ...], list[Cut]]) -> None:
    shape, layout = case
    for box, _, _ in layout:
        starts, length = run_starts(shape, box)
        assert [(start, start + length) for start in starts.tolist()] == list(box_runs(shape, box))


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


GOLDEN_FLOAT64 = "c6fdbe0fa0401af5"
GOLDEN_BFLOAT16 = "4fbd1bfd16057e8f"
