"""Initial weights depend on (seed, name), never on the cut."""

from dataclasses import replace

import pytest
import torch

from triaxis.engine.layout.shard_spec import Init, ParamSpec, localize
from triaxis.engine.tensor_parallel.initial_weights import BLOCK_NUMEL, initial_box, initialize
from triaxis.engine.tensor_parallel.parameter import ShardedParameter

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


def test_threads_change_nothing_and_their_errors_are_raised() -> None:
    drawn = []
    for num_threads in (1, 3):
        known = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            drawn.append(_filled(9))
        finally:
            torch.set_num_threads(known)
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))

    too_short = ShardedParameter(localize(SPEC, tp=1, tp_index=0, sequence_parallel=False), torch.float32)
    too_short.value = torch.nn.Parameter(torch.zeros(5))
    with pytest.raises(RuntimeError, match="size"):
        initialize([too_short], 0)


def _filled(count: int) -> list[torch.Tensor]:
    parameters = []
    for index in range(count):
        spec = replace(SPEC, name=f"layers.{index}.attention.kv.weight")
        parameter = ShardedParameter(localize(spec, tp=1, tp_index=0, sequence_parallel=False), torch.float32)
        parameter.value = torch.nn.Parameter(torch.full(parameter.record.local_shape, torch.nan))
        parameters.append(parameter)
    initialize(parameters, 3)
    return [parameter.value.data for parameter in parameters]
