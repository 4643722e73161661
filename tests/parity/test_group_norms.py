"""Norms by groups of parameters equal those of one process, in covering layouts."""

import math
from collections.abc import Mapping

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.cases import Case, build_rank, is_trained, load_weights, run_oracle, weights_of
from triaxis.engine.config.quantities.update_settings import group_of
from triaxis.engine.telemetry.meters.group_norms import OTHERS, GroupNorms
from triaxis.engine.telemetry.record.metrics import Measured

LR = 1e-2
CASES = [
    Case("llama", num_layers=3, groups=True, global_batch_size=2),
    pytest.param(
        Case("gpt", tp=2, pp=2, dp=2, num_layers=4, groups=True, bucket_bytes=300), marks=pytest.mark.distributed
    ),
    pytest.param(
        Case("qwen", tp=4, dp=2, sequence_parallel=True, num_layers=3, groups=True, compiled=True),
        marks=[pytest.mark.distributed, pytest.mark.slow],
    ),
    pytest.param(
        Case("deepseek", dp=4, ep=2, tp=2, num_layers=4, groups=True),
        marks=[pytest.mark.distributed, pytest.mark.slow],
    ),
]


def measured(rank: int, case: Case, weights: Mapping[str, torch.Tensor]) -> tuple[Measured | None, Measured | None]:
    """The norms of the second step, one of every two, and of the first, which is none of them."""
    engine, batches = build_rank(rank, case)
    load_weights(engine, {name: weight.detach() for name, weight in weights.items()})
    norms = GroupNorms(engine.optimizer, engine.topology.axis("world"), engine.config.optimizer.groups, 2)
    norms.begin(0)
    results = []
    for step in range(2):
        losses = engine.forward_backward(batches.next_step())
        norms.before_update()
        results.append(engine.update(losses, lr=LR / (step + 1)).wait())
        norms.after_update()
    batches.close()
    return norms.read(1, results[1]), norms.read(0, results[0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_norms_equal_those_of_one_process(case: Case) -> None:
    weights = weights_of(case.model, case.num_layers)
    after: list[dict[str, torch.Tensor]] = []
    expected = run_oracle(case, weights, 2, lambda now: after.append({name: one.clone() for name, one in now.items()}))
    groups = case.config().optimizer.groups
    for found_by_rank, unmeasured in run_ranks(measured, case.world_size, case, weights):
        assert unmeasured is None and found_by_rank is not None
        norms, charts = found_by_rank.fields["norms"], found_by_rank.charts
        assert [*norms] == [*(group["match"] for group in groups), OTHERS]
        for number, (name, found) in enumerate(norms.items()):
            place = None if name == OTHERS else number
            members = [each for each in after[0] if is_trained(each, case) and group_of(each, groups) == place]
            assert members, name
            weight, update = (
                math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))
                for tensors in (
                    [after[0][each] for each in members],
                    [after[1][each] - after[0][each] for each in members],
                )
            )
            assert found["weight"] == pytest.approx(weight, rel=1e-9)
            assert found["update"] == pytest.approx(update, rel=1e-7)
            assert charts[f"learning/norms/{name}/relative_update"] == found["update"] / found["weight"]
        # The shares of the groups make the norm of all.
        assert math.hypot(*(one["grad"] for one in norms.values())) == pytest.approx(expected.steps[1][1], rel=1e-9)


def first_norms(rank: int, case: Case, weights: Mapping[str, torch.Tensor]) -> Measured | None:
    engine, batches = build_rank(rank, case)
    load_weights(engine, {name: weight.detach() for name, weight in weights.items()})
    norms = GroupNorms(engine.optimizer, engine.topology.axis("world"), engine.config.optimizer.groups, 1)
    losses = engine.forward_backward(batches.next_step())
    batches.close()
    norms.before_update()
    result = engine.update(losses, lr=LR).wait()
    norms.after_update()
    return norms.read(0, result)


def test_gradients_are_those_of_the_first_step() -> None:
    case = Case("llama", num_layers=3, groups=True, global_batch_size=2)
    weights = weights_of(case.model, case.num_layers)
    grads, groups = run_oracle(case, weights, 1).grads, case.config().optimizer.groups
    measured = first_norms(0, case, weights)
    assert measured is not None
    norms = measured.fields["norms"]
    total = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
    of_all = math.hypot(*(one["grad"] for one in norms.values()))
    for number, (name, found) in enumerate(norms.items()):
        place = None if name == OTHERS else number
        squares = [float(grad.square().sum()) for each, grad in grads.items() if group_of(each, groups) == place]
        assert found["grad"] / of_all == pytest.approx(math.sqrt(sum(squares)) / total, rel=1e-9), name
