"""Initial weights depend on (seed, name), never on the cut."""

import torch

from engine.initial_weights import BLOCK_NUMEL, initial_box
from engine.shard_spec import Init, ParamSpec, localize

SPEC = ParamSpec("layers.0.attention.kv.weight", (2, 4, 40, 301), Init("normal", 0.02), tp_dim=1)


def whole(spec: ParamSpec, seed: int) -> torch.Tensor:
    return initial_box(localize(spec, tp=1, tp_index=0, sequence_parallel=False), seed).view(spec.shape)


def test_every_cut_gives_the_same_weights() -> None:
    assert SPEC.numel > BLOCK_NUMEL, "the test must cross a block boundary"
    expected = whole(SPEC, 3)
    for tp in (2, 4, 8):
        for index in range(tp):
            record = localize(SPEC, tp=tp, tp_index=index, sequence_parallel=False)
            part = initial_box(record, 3).view(record.box_shape)
            assert torch.equal(part, expected[tuple(slice(*bounds) for bounds in record.box)])


def test_seed_and_name_matter_and_the_distribution_is_right() -> None:
    expected = whole(SPEC, 3)
    other_name = ParamSpec("layers.1.attention.kv.weight", SPEC.shape, SPEC.init, tp_dim=1)
    assert not torch.equal(expected, whole(SPEC, 4))
    assert not torch.equal(expected, whole(other_name, 3))
    assert abs(float(expected.mean())) < 3e-4
    assert abs(float(expected.std()) / 0.02 - 1) < 0.02
    # Blocks are drawn apart: none repeats another.
    assert not torch.equal(expected.flatten()[:1000], expected.flatten()[BLOCK_NUMEL : BLOCK_NUMEL + 1000])


def test_constant_initialisers() -> None:
    ones = ParamSpec("final_norm.weight", (7,), Init("ones"))
    zeros = ParamSpec("final_norm.bias", (7,), Init("zeros"))
    assert torch.equal(whole(ones, 0), torch.ones(7))
    assert torch.equal(whole(zeros, 0), torch.zeros(7))
