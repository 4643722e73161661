"""Options of a transformer block equal the oracle: each alone in one process, and together in covering layouts."""

import pytest

from tests.parity.block_models import BLOCKS
from tests.parity.cases import Case, run_case, run_oracle, weights_of
from tests.parity.models import MODELS
from tests.parity.test_parity import ALL_PARTS, SELECTIVE, check, compare, oracle

STEPS = 2


KEPT_NORMS = ("rope", "activation", "mlp", "attention")
COVERING = [
    Case("olmo2", tp=4, sequence_parallel=True, num_layers=2, head_tokens=3, global_batch_size=2),
    Case("olmo2", tp=2, pp=2, recompute=SELECTIVE, modules=KEPT_NORMS, offload=1, global_batch_size=4),
    Case("gemma2", pp=3, layers_per_stage=(1, 2, 1), recompute=SELECTIVE, modules=ALL_PARTS, global_batch_size=3),
    Case("neox", tp=2, sequence_parallel=True, gathered_inputs="keep", num_layers=2, global_batch_size=2),
]
"""Key heads in replicas, what is made again after communication, a tied head over uneven stages, gathered inputs."""

COVERING_TOO = [
    Case("olmo2", tp=8, num_layers=2, recompute=("full", "uniform", 1), global_batch_size=2),
    Case("olmo2", tp=2, pp=2, vpp=2, dp=2, sequence_parallel=True, recompute=("full", "block", 1)),
    Case("olmo2", tp=2, sequence_parallel=True, gathered_inputs="keep", offload=4, micro_batch_size=2),
    Case("gemma2", tp=2, pp=2, vpp=2, dp=2, sequence_parallel=True, documents=True),
    Case("gemma2", tp=4, head_tokens=5, recompute=("full", "uniform", 2)),
    Case("neox", tp=2, pp=2, dp=2, recompute=SELECTIVE, modules=ALL_PARTS, offload=1),
    Case("granite", tp=2, pp=2, vpp=2, sequence_parallel=True, recompute=SELECTIVE, modules=("norm", "activation")),
    *(Case(option, tp=2, pp=2, sequence_parallel=True, global_batch_size=2) for option in BLOCKS),
]


def compare_here(case: Case) -> None:
    """One rank, in this process."""
    weights = weights_of(case.model, case.num_layers)
    check([run_case(0, case, weights, STEPS)], run_oracle(case, weights, STEPS), weights)


@pytest.mark.parametrize("option", BLOCKS)
def test_each_option_equals_the_oracle(option: str) -> None:
    compare_here(Case(option, global_batch_size=2, micro_batch_size=2))


@pytest.mark.parametrize("head_tokens", [None, 5])
@pytest.mark.parametrize("options", [{"z_loss": 0.03}, {"z_loss": 0.5, "logit_softcap": 1.5, "logit_divisor": 0.3}])
def test_logits_and_z_loss_equal_the_oracle(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, float], head_tokens: int | None
) -> None:
    monkeypatch.setitem(MODELS, "logits", MODELS["plain"] | options)
    compare_here(Case("logits", global_batch_size=2, head_tokens=head_tokens))


def test_the_reported_loss_has_no_z_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "z", MODELS["plain"] | {"z_loss": 0.5})
    plain, z = (run_case(0, Case(name), weights_of("plain"), 2) for name in ("plain", "z"))
    assert plain.loss_sum == z.loss_sum and plain.steps[0][1] != z.steps[0][1]


def test_each_option_changes_the_loss() -> None:
    losses = [oracle(Case(option), 1).loss for option in (*BLOCKS, "plain")]
    assert len({f"{loss:.6f}" for loss in losses}) == len(losses)


@pytest.mark.distributed
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_covering_layouts_equal_the_oracle(case: Case) -> None:
    compare(case, STEPS)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("case", COVERING_TOO, ids=str)
def test_more_covering_layouts_equal_the_oracle(case: Case) -> None:
    compare(case, STEPS)
