"""Memory with frozen parameters: what autograd keeps, and flat buffers and optimizer state, are the formulas' to the byte."""

from typing import Any

import pytest

from tests.harness import run_ranks
from tests.models.predict.test_activation_memory import LLAMA, config_of, ends_of_all
from tests.models.predict.test_rank_memory import most_kept
from triaxis.engine.config.quantities.plan import parallel_sizes, stages_of
from triaxis.engine.config.tree import Config
from triaxis.models.predict.activation_memory import kept_bytes, moved_bytes
from triaxis.models.predict.rank_memory import predict, predicted_memory


def frozen(*patterns: str, model: dict[str, Any], **choices: Any) -> Config:
    """Return a configuration of two stages of two layers, with these parameters frozen."""
    config = config_of(model, **choices)
    groups = [{"match": pattern, "freeze": True} for pattern in patterns]
    return Config.model_validate(config.model_dump() | {"optimizer": {"lr": 1e-3, "groups": groups}})


PRODUCTS = ("*.attention.q.weight", "*.attention.kv.weight", "*.proj.weight", "*.gate_up.weight", "*.mlp.down.weight")

CONFIGS = {
    "the first stage": frozen("embedding.*", "layers.[0-1].*", model=LLAMA, tp=2),
    "the products": frozen(*PRODUCTS, model=LLAMA, tp=2, sp=True),
}


@pytest.mark.distributed
def test_autograd_keeps_what_the_formula_says() -> None:
    (found,) = run_ranks(ends_of_all, 1, CONFIGS, timeout_seconds=600)
    for name, config in CONFIGS.items():
        sizes = parallel_sizes(config)
        state = [rank.parameters + rank.gradients + rank.optimizer for rank in predict(config, sizes, nccl=False).ranks]
        for pp, (stage, footprint) in enumerate(zip(stages_of(config), found[name], strict=True)):
            measured = sum(one.num_bytes for one in footprint.saved)
            expected = kept_bytes(config, sizes, stage) + moved_bytes(config, sizes, stage)
            assert measured == expected, f"{name}, stage {footprint.stages}"
            memory = predicted_memory(config, sizes, pp, nccl=False)
            assert footprint.most.get("p2p", 0) <= memory.messages, f"{name}, stage {footprint.stages}"
            least, most = most_kept(config, footprint)
            assert least <= memory.activations <= most, f"{name}, stage {footprint.stages}"
            assert sum(footprint.state.values()) == state[pp], f"{name}, stage {footprint.stages}"
