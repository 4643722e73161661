"""Layers with experts equal the oracle, which computes every expert on every token: in one process, and cut in every way."""

import pytest

from tests.parity.cases import Case, run_case, run_oracle, weights_of
from tests.parity.moe_models import EXPERTS
from tests.parity.test_parity import ALL_PARTS, SELECTIVE, check, compare

STEPS, STEPS_OF_LAYOUTS = 3, 2
"""The second step chooses by a bias that the first has moved."""
FULL = ("full", "uniform", 1)


def compare_here(case: Case) -> None:
    """One rank, in this process."""
    weights = weights_of(case.model, case.num_layers)
    check([run_case(0, case, weights, STEPS)], run_oracle(case, weights, STEPS), weights)


@pytest.mark.parametrize("option", EXPERTS)
def test_each_option_equals_the_oracle(option: str) -> None:
    compare_here(Case(option, global_batch_size=4, micro_batch_size=2))


@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
def test_one_rank_equals_the_oracle(dispatch: str) -> None:
    compare_here(Case("deepseek", global_batch_size=4, micro_batch_size=2, dispatch=dispatch, recompute=FULL))
    parts = Case("deepseek", global_batch_size=4, dispatch=dispatch, recompute=SELECTIVE, modules=ALL_PARTS, offload=2)
    compare_here(parts)


COVERING = [
    Case("deepseek", dp=2, ep=2, micro_batch_size=2, global_batch_size=4),
    Case("deepseek", dp=2, ep=2, dispatch="all_to_all", micro_batch_size=2, global_batch_size=4),
    Case("deepseek", tp=2, ep=2, sequence_parallel=True, global_batch_size=2),
    Case("deepseek", tp=2, ep=2, global_batch_size=2),
    Case("deepseek", tp=2, dp=2, ep=4, dispatch="all_to_all", global_batch_size=2),
    Case("deepseek", tp=2, etp=2, dp=2, ep=2, sequence_parallel=True, global_batch_size=2),
    Case("deepseek", tp=2, etp=2, dp=2, ep=2, dispatch="all_to_all", recompute=FULL, global_batch_size=2),
    Case("deepseek", tp=2, cp=2, ep=4, sequence_parallel=True, dispatch="all_to_all", global_batch_size=2),
    Case("deepseek", pp=2, dp=2, ep=2, recompute=FULL, bucket_bytes=1, global_batch_size=4),
    Case("deepseek", pp=2, vpp=2, dp=2, tp=2, ep=2, sequence_parallel=True, dispatch="all_to_all", global_batch_size=4),
    Case("deepseek", pp=2, tp=2, ep=2, sequence_parallel=True, schedule="zb_h1", global_batch_size=5),
    Case("deepseek", pp=2, vpp=2, dp=2, ep=2, schedule="zbv", dispatch="all_to_all", global_batch_size=8),
    Case("moe one of many", dp=4, ep=4, num_layers=2, staged=True, global_batch_size=4),
    Case("moe in turn", tp=2, cp=2, ep=2, num_layers=2, dispatch="all_to_all", global_batch_size=2),
]
"""Each axis alone with both forms of dispatch, experts cut over tp or not, and all of them together."""


@pytest.mark.distributed
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_covering_layouts_equal_the_oracle(case: Case) -> None:
    compare(case, STEPS_OF_LAYOUTS)
