"""Memory with frozen parameters: what autograd keeps, and flat buffers and optimizer state, are the formulas' to the byte."""

from typing import Any

import pytest

from tests.harness import run_ranks
from tests.models.predict.test_activation_memory import CHEAP, GPT, KEPT, LLAMA, config_of, ends_of_all, parts
from tests.models.predict.test_rank_memory import most_kept
from tests.parity.cases import Case
from triaxis.engine.config.plan import parallel_sizes, stages_of
from triaxis.engine.config.tree import Config
from triaxis.models.predict.activation_memory import kept_bytes, moved_bytes
from triaxis.models.predict.rank_memory import predict, predicted_memory
from triaxis.models.trained_part import TrainedPart

LOWER = ("embedding.*", "layers.0.*")


def frozen(*patterns: str, model: dict[str, Any], **choices: Any) -> Config:
    """Return a configuration of two stages of two layers, with these parameters frozen."""
    config = config_of(model, **choices)
    groups = [{"match": pattern, "freeze": True} for pattern in patterns]
    return Config.model_validate(config.model_dump() | {"optimizer": {"lr": 1e-3, "groups": groups}})


LATENT = {
    "norm": "rmsnorm",
    "mla": {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
}

PRODUCTS = ("*.attention.q.weight", "*.attention.kv.weight", "*.proj.weight", "*.gate_up.weight", "*.mlp.down.weight")

COMMON = {
    "the lower part": frozen(*LOWER, model=LLAMA, tp=2, sp=True),
    "the first stage": frozen("embedding.*", "layers.[0-1].*", model=LLAMA, tp=2),
    "the products": frozen(*PRODUCTS, model=LLAMA, tp=2, sp=True),
    "all but the embedding, inputs kept": frozen(
        "layers.*", "final*", "head*", model=LLAMA, tp=2, sp=True, recompute=KEPT
    ),
    "the products, explicit": frozen(
        "*.q.weight", "*.kv.weight", "*.proj.weight", "*.up.weight", model=GPT, tp=2, attention="explicit"
    ),
    "the products, parts again": frozen(*PRODUCTS, model=LLAMA, tp=2, recompute=parts(*CHEAP, "mlp", "attention")),
    "the lower part, on the host": frozen(*LOWER, model=LLAMA, tp=2, offload={"num_layers": 1, "min_bytes": 1}),
    "the head, in pieces": frozen("head.*", model=LLAMA, tp=2, recompute={"head_tokens": 100}),
    "positions": frozen(
        "*.position.*", "*.word.*", "layers.0.*", model={**GPT, "tie_embeddings": False}, tp=1, attention="explicit"
    ),
}
CI = {name: COMMON[name] for name in ("the first stage", "the products")}
SLOW = {
    "position alone": frozen("*.position.*", model=GPT, tp=1, attention="explicit"),
    "words alone": frozen("*.word.*", model={**GPT, "tie_embeddings": False}, tp=1, attention="explicit"),
    "one layer again": frozen(
        *LOWER, "*.proj.*", model=LLAMA, tp=2, recompute={"granularity": "full", "method": "block", "num_layers": 1}
    ),
    "all again": frozen(*LOWER, "*.down.*", model=LLAMA, tp=2, recompute={"granularity": "full", "num_layers": 2}),
    "one sample": frozen(*PRODUCTS, model=LLAMA, tp=2, b=1),
    "a part of each row": frozen(*PRODUCTS, model=LLAMA, tp=2, cp=2, recompute=parts("norm")),
    "some heads": frozen(*PRODUCTS, model=LLAMA, tp=1, cp=2, cp_method="ulysses"),
    "a parallel block without norms before": frozen(
        "*.q.weight", "*.kv.weight", model={**LLAMA, "parallel_block": True, "norm_placement": "after"}, tp=2
    ),
    "tokens ahead": frozen(
        "embedding.*", "layers.[0-3].*", "*.mtp.projection.*", model={**LLAMA, "mtp": {"num_layers": 2}}, tp=2
    ),
    "latents": frozen("*.q_a.*", "*.kv_a.*", "*.kv_b.*", "*.proj.*", model=LATENT, tp=2),
    "latents, queries": frozen("*.q_b.*", model=LATENT, tp=2, sp=True, recompute=KEPT),
    "experts": Case(
        "deepseek", pp=2, tp=2, num_layers=4, frozen=(*LOWER, "*.experts.gate_up.*", "*.shared.gate_up.*")
    ).config(),
    "shared experts": Case(
        "deepseek", pp=2, tp=2, num_layers=4, sequence_parallel=True, frozen=("*.shared.*",)
    ).config(),
    "experts, weight gradients wait": Case(
        "deepseek", pp=2, num_layers=4, schedule="zb_h1", frozen=("*.down.*", "layers.1.*", "*.proj.*")
    ).config(),
}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "configs", [pytest.param(CI, id="ci"), pytest.param(COMMON | SLOW, id="rest", marks=pytest.mark.slow)]
)
def test_autograd_keeps_what_the_formula_says(configs: dict[str, Config]) -> None:
    (found,) = run_ranks(ends_of_all, 1, configs, timeout_seconds=600)
    for name, config in configs.items():
        sizes, part = parallel_sizes(config), TrainedPart.of(config)
        state = [rank.parameters + rank.gradients + rank.optimizer for rank in predict(config, sizes, nccl=False).ranks]
        for pp, (stage, footprint) in enumerate(zip(stages_of(config), found[name], strict=True)):
            measured = sum(one.num_bytes for one in footprint.saved)
            kept = part.on(stage)
            expected = kept_bytes(config, sizes, kept) + moved_bytes(config, sizes, kept)
            assert measured == expected, f"{name}, stage {footprint.stages}"
            memory = predicted_memory(config, sizes, pp, nccl=False)
            assert footprint.most.get("p2p", 0) <= memory.messages, f"{name}, stage {footprint.stages}"
            least, most = most_kept(config, footprint)
            assert least <= memory.activations <= most, f"{name}, stage {footprint.stages}"
            assert sum(footprint.state.values()) == state[pp], f"{name}, stage {footprint.stages}"
