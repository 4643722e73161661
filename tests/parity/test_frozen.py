"""Frozen parameters: weights after three steps equal the oracle's, in covering layouts; what is frozen keeps its bits."""

from dataclasses import replace

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.cases import Case, build_rank, run_case, run_oracle, weights_of
from tests.parity.test_parity import check, compare
from tests.parity.test_step_properties import traffic_of_a_step

LOWER = ("embedding.*", "layers.[0-1].*")
"""The lower part of a model: gradients pass through it to nothing that is updated."""

ALONE = [
    Case("gpt", num_layers=4, frozen=LOWER, global_batch_size=2),
    Case(
        "qwen", num_layers=3, frozen=("*.q.weight", "*.kv.bias", "*norm.weight", "*.down.weight"), global_batch_size=2
    ),
    Case("gpt_untied", num_layers=2, frozen=("head.weight",), head_tokens=5, global_batch_size=2),
    Case("ahead deepseek", num_layers=4, frozen=(*LOWER, "*.router.*", "*.up.weight"), global_batch_size=2),
    Case("mla", num_layers=3, frozen=("embedding.*", "*_a.weight", "*_a_norm.weight"), global_batch_size=2),
]


@pytest.mark.parametrize(
    "case", [case if case in ALONE[:2] else pytest.param(case, marks=pytest.mark.slow) for case in ALONE], ids=str
)
def test_one_process_equals_the_oracle(case: Case) -> None:
    weights = weights_of(case.model, case.num_layers)
    check([run_case(0, case, weights, 3)], run_oracle(case, weights, 3), weights, case)


SMALL = {"num_layers": 4, "global_batch_size": 4}


LAYOUTS = [
    Case("gpt", pp=2, vpp=2, dp=2, frozen=("embedding.*", "layers.[0-1].*", "*norm.weight"), num_layers=4),
    Case("llama", tp=2, pp=2, sequence_parallel=True, schedule="zb_h1", frozen=(*LOWER, "*.up.*"), **SMALL),
    Case("llama", cp=2, dp=2, frozen=("embedding.*", "*.kv.weight"), num_layers=3, global_batch_size=2),
    Case(
        "qwen",
        tp=8,
        sequence_parallel=True,
        frozen=("*.q.weight", "*.q_norm.weight", "*.down.weight"),
        num_layers=2,
    ),
    Case(
        "gpt_dropout",
        tp=2,
        pp=2,
        frozen=("embedding.*", "layers.[0-2].*"),
        recompute=("full", "uniform", 2),
        **SMALL,
    ),
    Case("ahead deepseek", dp=4, ep=2, tp=2, num_layers=4, frozen=(*LOWER, "*.experts.up.*"), bucket_bytes=1),
]
"""The first two are in the CI tier."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case", [case if case in LAYOUTS[:2] else pytest.param(case, marks=pytest.mark.slow) for case in LAYOUTS], ids=str
)
def test_layouts_equal_the_oracle(case: Case) -> None:
    compare(case)


TRAFFIC = [
    Case("qwen", tp=2, dp=2, frozen=("embedding.*", "layers.0.*", "*.q.weight"), num_layers=3, bucket_bytes=500),
    Case("gpt_untied", tp=2, pp=2, sequence_parallel=True, frozen=(*LOWER, "*.up.weight"), bucket_bytes=2000, **SMALL),
    Case(
        "ahead deepseek",
        tp=2,
        dp=2,
        ep=2,
        frozen=(*LOWER, "*.experts.up.*"),
        recompute=("full", "block", 1),
        num_layers=4,
    ),
]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case", [case if case in TRAFFIC[:1] else pytest.param(case, marks=pytest.mark.slow) for case in TRAFFIC], ids=str
)
def test_bytes_and_calls_equal_the_formulas(case: Case) -> None:
    for rank, (measured, expected, num_calls, differing) in enumerate(
        run_ranks(traffic_of_a_step, case.world_size, case, False)
    ):
        assert measured == expected, f"rank {rank}"
        assert num_calls > 0 and differing == 0


def test_gradients_of_frozen_weights_are_those_of_trained_ones_and_count_nowhere() -> None:
    """A step with and without freezing: the same main grads; a gradient that is not finite stops no step and is in no norm."""
    case = Case("llama", num_layers=2, frozen=LOWER, global_batch_size=2)
    frozen, batches = build_rank(0, case)
    trained, _ = build_rank(0, replace(case, frozen=()))
    microbatches = batches.next_step()
    for engine in (frozen, trained):
        engine.forward_backward(microbatches)
    for name, parameter in trained.parameters.items():
        assert torch.equal(frozen.parameters[name].bound_main_grad(), parameter.bound_main_grad()), name
    losses = frozen.forward_backward(microbatches)
    norm = frozen.optimizer.grad_square_sum()
    frozen.parameters["embedding.word.weight"].bound_main_grad().fill_(torch.nan)
    assert torch.equal(frozen.optimizer.grad_square_sum(), norm)
    before = frozen.parameters["embedding.word.weight"].value.clone()
    result = frozen.update(losses, 1e-3).wait()
    assert not result.skip and result.grad_norm == pytest.approx(float(norm.sqrt()), rel=1e-12)
    assert torch.equal(frozen.parameters["embedding.word.weight"].value, before)
