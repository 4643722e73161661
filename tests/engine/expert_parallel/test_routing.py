"""The rule of a choice, and what the sequence loss counts, held to the words of the rule."""

import pytest
import torch

from tests.oracle import oracle_choice
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.config.schema.moe import BalanceConfig, MoEConfig
from triaxis.engine.expert_parallel.routing import Router, _logits, top_experts
from triaxis.engine.kernels.fusion import EAGER

TOKENS = torch.rand(200, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
BIAS = torch.linspace(0.0, 2.0, 12, dtype=torch.float64)


def moe_of(score: str, groups: int, **balance: object) -> MoEConfig:
    return MoEConfig(
        num_experts=12,
        top_k=3,
        ffn_hidden_size=8,
        score="sigmoid",
        groups=groups,
        top_groups=2,
        group_score=score,  # type: ignore[arg-type]
        balance=BalanceConfig(**balance),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("score", ["max", "top2"])
@pytest.mark.parametrize("groups", [2, 3, 4])
def test_a_group_counts_by_its_best_however_many_it_has(score: str, groups: int) -> None:
    """Groups of three to six experts; the sum of three of them would choose other groups."""
    moe = moe_of(score, groups)
    wanted = [oracle_choice(token, moe) for token in TOKENS.tolist()]
    assert top_experts(TOKENS, None, moe).tolist() == wanted


@pytest.mark.parametrize(("counts", "is_plain"), [("scores", True), ("choices", False)])
def test_the_sequence_loss_counts_the_best_scores(counts: str, is_plain: bool) -> None:
    moe = moe_of("top2", 4, sequence_loss=0.1, sequence_counts=counts, bias_rate=0.1)
    nothing: Axis = None  # type: ignore[assignment]
    router = Router(moe, len(TOKENS), nothing, 1.0, torch.ones(()), EAGER, "separate")
    chosen, plain = router.choose(TOKENS, BIAS), TOKENS.sort(descending=True, stable=True).indices[:, :3]
    assert chosen.tolist() != plain.tolist()
    assert router.counted(chosen, TOKENS).tolist() == (plain if is_plain else chosen).tolist()


def test_logits_are_the_same_product_by_both_kernels() -> None:
    """In 16 bits, `fused` needs a GPU: the stub's layouts with experts compare it."""
    weight = TOKENS[:7].clone()
    found = [_logits(TOKENS, weight, kernel) for kernel in ("separate", "fused")]  # type: ignore[arg-type]
    torch.testing.assert_close(found[0], TOKENS @ weight.t(), rtol=0, atol=0)
    torch.testing.assert_close(found[1], found[0], rtol=1e-14, atol=1e-14)
