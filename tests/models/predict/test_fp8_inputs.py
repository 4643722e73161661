"""Inputs that layers keep in FP8: what autograd holds is what the formula says, and less than without."""

from typing import Any

import pytest

from tests.models.predict.test_activation_memory import CHEAP, GPT, KEPT, LLAMA, config_of, formula, kept_of_all, parts
from tests.models.predict.test_latent_memory import BY_BLOCK, FROM_X, latent
from tests.models.predict.test_rank_memory import most_kept
from triaxis.engine.config.quantities.plan import parallel_sizes, stages_of
from triaxis.engine.config.tree import Config
from triaxis.launch.footprint.run import Footprints
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.activation_memory import kept_bytes
from triaxis.models.predict.rank_memory import predicted_memory

FP8 = {"recipe": "tensorwise", "backend": "emulated"}
GATHER = {"sp": True, "fp8": FP8 | {"gather": "fp8"}}
SHARED = {
    "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 128, "shared_experts": 1},
    "layers": ["dense", "moe"],
}


def fp8(model: dict[str, Any], **choices: Any) -> Config:
    return config_of(model, **{"tp": 2, "fp8": FP8, **choices})


CASES = {
    "whole": fp8(LLAMA),
    "whole, fp32, one layer in the run's dtype": fp8(LLAMA, dtype="fp32", fp8=FP8 | {"bf16_layers": [1, 0]}),
    "shards": fp8(LLAMA, sp=True),
    "gathered inputs kept": fp8(LLAMA, sp=True, recompute=KEPT),
    "shards, sent in FP8": fp8(LLAMA, **GATHER),
    "gathered inputs kept, sent in FP8": fp8(LLAMA, recompute=KEPT, **GATHER),
    "shards, sent in FP8, norms again": fp8(LLAMA, recompute=parts("norm"), **GATHER),
    "latents, sent in FP8": latent(tp=2, **GATHER),
    "queries from x, sent in FP8": latent(FROM_X, tp=2, **GATHER),
    "shared experts, sent in FP8": fp8({**LLAMA, **SHARED}, **GATHER),
    "a group of one": fp8(LLAMA, tp=1, sp=True),
    "gpt with dropout": fp8(GPT, attention="explicit"),
    "blocks": fp8(LLAMA, fp8={"recipe": "mxfp8"}),
    "norms after": fp8({**LLAMA, "norm_placement": "after"}),
    "norms after, parallel, gathered inputs kept": fp8(
        {**LLAMA, "norm_placement": "after", "parallel_block": True}, sp=True, recompute=KEPT
    ),
    "parallel": fp8({**LLAMA, "parallel_block": True}),
    "norms again": fp8(LLAMA, recompute=parts("norm")),
    "the MLP again": fp8(LLAMA, recompute=parts("mlp")),
    "all parts again": fp8({**LLAMA, "qk_norm": True}, recompute=parts(*CHEAP, "mlp", "attention")),
    "gathered inputs kept, activations again": fp8(LLAMA, sp=True, recompute=parts("activation") | KEPT),
    "layers again": fp8(LLAMA, recompute={"granularity": "full", "num_layers": 2}),
    "one layer again, parts of the other": fp8(LLAMA, recompute=BY_BLOCK | {"modules": CHEAP}),
    "on the host": fp8(LLAMA, offload={"num_layers": 2, "min_bytes": 1}),
    "gathered inputs kept, on the host": fp8(
        LLAMA, sp=True, recompute=KEPT, offload={"num_layers": 1, "min_bytes": 2**14}
    ),
    "parts of rows": fp8(LLAMA, cp=2),
    "latents": latent(tp=2, fp8=FP8),
    "layers again, latents, cp": latent(
        tp=2, sp=True, cp=2, recompute={"granularity": "full", "num_layers": 2}, fp8=FP8
    ),
    "latents, sp": latent(tp=2, sp=True, fp8=FP8),
    "latents, gathered inputs kept": latent(tp=2, sp=True, recompute=KEPT, fp8=FP8),
    "latents, cheap parts again": latent(tp=2, recompute=parts(*CHEAP), fp8=FP8),
    "queries from x": latent(FROM_X, tp=2, fp8=FP8),
    "queries from x, gathered inputs kept": latent(FROM_X, tp=2, sp=True, recompute=KEPT, fp8=FP8),
    "shared experts": fp8({**LLAMA, **SHARED}),
    "shared experts, gathered inputs kept": fp8({**LLAMA, **SHARED}, sp=True, recompute=KEPT),
    "tokens ahead": fp8({**LLAMA, "mtp": {"num_layers": 1}}),
}
IN_CI = ("whole", "gathered inputs kept", "layers again")


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_autograd_keeps_what_the_formula_says(name: str) -> None:
    assert kept_of_all(0, {name: CASES[name]}) == {name: formula(CASES[name])}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "whole",
        "gathered inputs kept",
        "all parts again",
        "one layer again, parts of the other",
        "latents",
        "on the host",
        "shared experts, gathered inputs kept",
    ],
)
def test_a_step_holds_what_was_predicted(name: str) -> None:
    config = CASES[name]
    for rank, found in enumerate(Footprints(config, build_chunks).of_stages()):
        least, most = most_kept(config, found)
        assert least <= predicted_memory(config, parallel_sizes(config), rank).activations <= most


@pytest.mark.parametrize("name", ["whole", "gathered inputs kept"])
def test_a_layer_keeps_less(name: str) -> None:
    config = CASES[name]
    plain = config.model_copy(update={"precision": config.precision.model_copy(update={"fp8": None})})
    sizes, stage = parallel_sizes(config), stages_of(config)[0]
    h, f, t, tokens = 512, 1280, 2, 2 * 128
    # Two layers; a norm's output twice, and an activation's.
    expected = 2 * tokens * (2 * h + f // t)
    assert kept_bytes(plain, sizes, stage) - kept_bytes(config, sizes, stage) == expected
