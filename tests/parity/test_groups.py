"""Groups of parameters: weights after three steps equal the oracle's, in covering layouts."""

import pytest

from tests.parity.cases import Case, run_case, run_oracle, weights_of
from tests.parity.test_parity import check, compare

STEPS = 3


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "extension"])
def test_factors_and_decays_equal_the_oracles(optimizer: str) -> None:
    case = Case("llama", num_layers=3, optimizer=optimizer, groups=True, global_batch_size=2)
    weights = weights_of(case.model, case.num_layers)
    expected = run_oracle(case, weights, STEPS)
    check([run_case(0, case, weights, STEPS)], expected, weights)
    plain = run_oracle(Case("llama", num_layers=3, optimizer=optimizer, global_batch_size=2), weights, STEPS)
    for name in ("embedding.word.weight", "layers.0.attention.q.weight", "layers.2.mlp.norm.weight"):
        assert not expected.weights[name].equal(plain.weights[name]), f"the group of {name} changes nothing"


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt", tp=2, dp=2, num_layers=3, groups=True, bucket_bytes=300, global_batch_size=4),
        Case(
            "gpt", pp=2, dp=2, num_layers=2, groups=True, bucket_bytes=300, global_batch_size=4, optimizer="extension"
        ),
        pytest.param(
            Case("gpt", tp=2, pp=2, dp=2, num_layers=4, groups=True, bucket_bytes=300), marks=pytest.mark.slow
        ),
        pytest.param(
            Case("qwen", tp=8, sequence_parallel=True, num_layers=3, groups=True, compiled=True), marks=pytest.mark.slow
        ),
        pytest.param(
            Case("ahead deepseek", dp=4, ep=2, tp=2, num_layers=4, groups=True, bucket_bytes=1), marks=pytest.mark.slow
        ),
        pytest.param(
            Case("llama", pp=2, vpp=2, dp=2, num_layers=4, groups=True, schedule="zbv"), marks=pytest.mark.slow
        ),
        pytest.param(Case("llama", cp=2, dp=2, num_layers=3, groups=True, optimizer="sgd"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_covering_layouts_equal_the_oracle(case: Case) -> None:
    compare(case, STEPS)
