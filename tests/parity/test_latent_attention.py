"""Latent attention equals the oracle: each form alone, and together in covering layouts."""

import pytest

from tests.parity.cases import Case, run_case, run_oracle, weights_of
from tests.parity.latent_models import LATENTS
from tests.parity.test_parity import ALL_PARTS, CHEAP_WITH_ROPE, SELECTIVE, check, compare, oracle

STEPS = 2


def compare_here(case: Case) -> None:
    """One rank, in this process."""
    weights = weights_of(case.model, case.num_layers)
    check([run_case(0, case, weights, STEPS)], run_oracle(case, weights, STEPS), weights)


@pytest.mark.parametrize("model", LATENTS)
def test_each_form_equals_the_oracle(model: str) -> None:
    compare_here(Case(model, global_batch_size=2))
    compare_here(Case(model, global_batch_size=2, micro_batch_size=2, documents=True))


@pytest.mark.parametrize(
    "case",
    [
        Case("mla, kinds", attention="blocks", documents=True, micro_batch_size=2, global_batch_size=4),
        Case("mla, kinds", attention="explicit", documents=True, micro_batch_size=2, global_batch_size=4),
        Case("mla", recompute=SELECTIVE, modules=ALL_PARTS, offload=2, micro_batch_size=2, global_batch_size=4),
        Case("mla, dropout", recompute=("full", "block", 1), offload=1, global_batch_size=2),
    ],
    ids=str,
)
def test_kernels_and_recomputation_equal_the_oracle(case: Case) -> None:
    compare_here(case)


COVERING = [
    Case("mla, kinds", tp=2, pp=3, sequence_parallel=True, documents=True, micro_batch_size=2, global_batch_size=6),
    Case("mla, queries from x", tp=4, sequence_parallel=True, gathered_inputs="keep", global_batch_size=2),
    Case("mla, mscale", tp=2, pp=2, sequence_parallel=True, schedule="zb_h1", global_batch_size=3),
    Case("mla", pp=2, vpp=2, dp=2, num_layers=4, recompute=SELECTIVE, modules=CHEAP_WITH_ROPE, global_batch_size=4),
    Case(
        "mla, kinds",
        cp=2,
        tp=2,
        sequence_parallel=True,
        documents=True,
        cp_gradients="accumulation",
        bucket_bytes=1,
        global_batch_size=4,
    ),
    Case(
        "mla, dropout",
        cp=2,
        tp=2,
        recompute=SELECTIVE,
        modules=("attention", "norm"),
        documents=True,
        global_batch_size=4,
    ),
]
"""Every way of cutting, with and without sequence parallelism, and what acts on latents in between."""

COVERING_TOO = [
    Case("mla", tp=2, dp=2),
    Case("mla, dropout", cp=2, dp=2, recompute=SELECTIVE, modules=("attention", "norm"), documents=True),
    Case("mla", tp=8, sequence_parallel=True, recompute=("full", "uniform", 2), global_batch_size=2),
    Case("mla", tp=2, pp=2, vpp=2, sequence_parallel=True, schedule="zbv", num_layers=4, global_batch_size=4),
    Case("mla, queries from x", tp=2, pp=2, schedule="zb_h1", recompute=SELECTIVE, modules=("attention", "mlp")),
    Case("mla", cp=4, tp=2, sequence_parallel=False, recompute=SELECTIVE, modules=ALL_PARTS, micro_batch_size=2),
    Case("mla, mscale", cp=2, pp=2, recompute=("full", "uniform", 1), documents=True),
    Case("mla, values as large as keys", cp=2, tp=2, attention="blocks", documents=True, offload=1),
    Case("mla, kinds", tp=2, pp=3, dp=1, staged=True, optimizer="sgd", head_tokens=3, global_batch_size=3),
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


def test_each_form_changes_the_loss() -> None:
    losses = [oracle(Case(model), 1).loss for model in LATENTS]
    assert len({f"{loss:.6f}" for loss in losses}) == len(losses)
