"""What autograd keeps of latent attention is what the formula says, with each kernel and whatever is recomputed."""

from typing import Any

import pytest

from tests.models.predict.test_activation_memory import CHEAP, KEPT, LLAMA, config_of, formula, kept_of_all, parts
from tests.models.predict.test_rank_memory import deeper, most_kept
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.tree import Config
from triaxis.launch.footprint.run import Footprints
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import predicted_memory

SIZES = {"q_lora_rank": 96, "kv_lora_rank": 72, "qk_nope_head_dim": 40, "qk_rope_head_dim": 16, "v_head_dim": 24}
FROM_X = {"mla": SIZES | {"q_lora_rank": None}}
KINDS = {
    "layers": ["near", "far", "near", "free"],
    "layer_kinds": {
        "near": {"window": 16, "rope_base": 100.0, "sinks": True},
        "far": {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "free": {"position": "none"},
    },
}
BY_BLOCK = {"granularity": "full", "method": "block", "num_layers": 1}


def latent(fields: dict[str, Any] | None = None, **choices: Any) -> Config:
    plain = {name: value for name, value in LLAMA.items() if name != "num_kv_heads"}
    return config_of({**plain, "mla": SIZES, **(fields or {})}, **choices)


CASES = {
    "sp": latent(tp=2, sp=True),
    "gathered inputs kept": latent(tp=4, sp=True, recompute=KEPT),
    "queries from x": latent(FROM_X, tp=2),
    "queries from x, gathered inputs kept": latent(FROM_X, tp=2, sp=True, recompute=KEPT),
    "values as large as keys": latent({"mla": SIZES | {"v_head_dim": 56}}, tp=2),
    "blocks": latent({"attention_softcap": 5.0}, tp=2, attention="blocks"),
    "kinds, cp": latent(KINDS, tp=2, cp=2, sp=True),
    "explicit": latent({"attention_dropout": 0.1}, tp=2, attention="explicit"),
    "explicit, cp, one sample": latent(tp=1, cp=2, b=1, attention="explicit"),
    "cheap parts again": latent(tp=2, sp=True, recompute=parts(*CHEAP)),
    "attention again, cp": latent(tp=2, cp=2, recompute=parts("attention")),
    "parts again, cp, on the host": latent(
        KINDS, tp=2, cp=2, recompute=parts(*CHEAP, "attention"), offload={"num_layers": 1, "min_bytes": 1}
    ),
    "explicit, parts again": latent(tp=2, attention="explicit", recompute=parts("attention", "rope")),
    "parallel, norms after": latent({"norm_placement": "after", "parallel_block": True}, tp=2, sp=True),
    "one layer again, cp, on the host": latent(
        tp=2, sp=True, cp=2, recompute=BY_BLOCK, offload={"num_layers": 2, "min_bytes": 2**14}
    ),
}


IN_CI = ("queries from x, gathered inputs kept", "parts again, cp, on the host")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in CASES]
)
def test_autograd_keeps_what_the_formula_says(name: str) -> None:
    assert kept_of_all(0, {name: CASES[name]}) == {name: formula(CASES[name])}


PEAKS = {
    "attention again": latent(tp=2, recompute=parts("attention"), b=2),
    "attention and rotation again, cp": latent(tp=2, cp=2, recompute=parts("attention", "rope", "norm")),
    "weight gradients that wait": deeper(
        latent(FROM_X, tp=2, sp=True), schedule={"name": "zb_h1"}, train={"global_batch_size": 16}
    ),
    "weight gradients that wait, parts again": deeper(
        latent(tp=2, recompute=parts(*CHEAP)), schedule={"name": "zb_h1"}, train={"global_batch_size": 16}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PEAKS)
def test_a_step_holds_what_was_predicted(name: str) -> None:
    config = PEAKS[name]
    for pp, footprint in enumerate(Footprints(config, build_chunks).of_stages()):
        least, most = most_kept(config, footprint)
        assert least <= predicted_memory(config, parallel_sizes(config), pp).activations <= most, pp
