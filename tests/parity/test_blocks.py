"""Options of a transformer block equal the oracle: each alone in one process, and together in covering layouts."""

import pytest

from tests.parity.cases import BLOCKS, Case, run_case, run_oracle, weights_of
from tests.parity.test_parity import check, oracle

STEPS = 2


def compare_here(case: Case) -> None:
    """One rank, in this process."""
    weights = weights_of(case.model, case.num_layers)
    check([run_case(0, case, weights, STEPS)], run_oracle(case, weights, STEPS), weights)


@pytest.mark.parametrize("option", BLOCKS)
def test_each_option_equals_the_oracle(option: str) -> None:
    compare_here(Case(option, global_batch_size=2, micro_batch_size=2))


def test_each_option_changes_the_loss() -> None:
    losses = [oracle(Case(option), 1).loss for option in (*BLOCKS, "plain")]
    assert len({f"{loss:.6f}" for loss in losses}) == len(losses)
