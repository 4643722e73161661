"""Multi-token prediction equals the oracle: each form alone, and together in covering layouts."""

import pytest

from tests.parity.cases import Case, run_case, run_oracle, weights_of
from tests.parity.mtp_models import AHEAD
from tests.parity.test_parity import ALL_PARTS, CHEAP_WITH_ROPE, SELECTIVE, check, compare

STEPS = 2


def compare_here(case: Case) -> None:
    """One rank, in this process."""
    weights = weights_of(case.model, case.num_layers)
    result, expected = run_case(0, case, weights, STEPS), run_oracle(case, weights, STEPS)
    check([result], expected, weights)
    assert len(result.ahead) > 0


@pytest.mark.parametrize("model", AHEAD)
def test_each_form_equals_the_oracle(model: str) -> None:
    compare_here(Case(model, global_batch_size=2))
    compare_here(Case(model, global_batch_size=2, micro_batch_size=2, documents=True))


@pytest.mark.parametrize(
    "case",
    [
        Case("ahead two", recompute=SELECTIVE, modules=ALL_PARTS, offload=3, micro_batch_size=2, global_batch_size=4),
        Case("ahead deepseek", recompute=("full", "block", 5), offload=5, global_batch_size=2),
        Case("ahead dropout", recompute=("full", "uniform", 2), head_tokens=3, global_batch_size=2),
    ],
    ids=str,
)
def test_recomputation_equals_the_oracle(case: Case) -> None:
    compare_here(case)


COVERING = [
    Case("ahead two", tp=2, pp=2, sequence_parallel=True, documents=True, micro_batch_size=2, global_batch_size=4),
    Case("ahead deepseek", pp=2, cp=2, dp=2, ep=2, num_layers=4, bucket_bytes=1, documents=True, global_batch_size=4),
]
"""Every way of cutting, with an embedding at both ends."""

COVERING_TOO = [
    Case("ahead tied", tp=2, pp=2, schedule="zb_h1", global_batch_size=3),
    Case("ahead shaped", cp=2, tp=2, sequence_parallel=True, documents=True, global_batch_size=4),
    Case("ahead", pp=2, vpp=2, dp=2, num_layers=4, recompute=SELECTIVE, modules=CHEAP_WITH_ROPE, global_batch_size=4),
    Case("ahead two", tp=2, pp=2, vpp=2, sequence_parallel=True, schedule="zbv", num_layers=4, global_batch_size=4),
    Case("ahead tied", pp=2, vpp=2, schedule="zbv", num_layers=4, global_batch_size=4),
    Case("ahead two", tp=2, pp=2, sequence_parallel=True, schedule="zb_h1", gathered_inputs="keep", head_tokens=3),
    Case("ahead deepseek", tp=2, cp=2, dp=2, ep=4, etp=2, sequence_parallel=True, documents=True, global_batch_size=4),
    Case("ahead deepseek", tp=2, pp=2, dp=2, ep=2, recompute=("full", "uniform", 1), num_layers=4, global_batch_size=4),
    Case("ahead dropout", tp=4, cp=2, recompute=("full", "block", 3), offload=1, documents=True),
    Case("ahead two", pp=2, layers_per_stage=(2, 0), global_batch_size=4),
    Case("ahead", tp=8, sequence_parallel=False, optimizer="sgd", staged=True, global_batch_size=2),
]


@pytest.mark.distributed
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_covering_layouts_equal_the_oracle(case: Case) -> None:
    compare(case, STEPS)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("case", COVERING_TOO, ids=str)
def test_more_covering_layouts_equal_the_oracle(case: Case) -> None:
    compare(case, STEPS)
