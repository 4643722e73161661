"""Counted facts equal those that other modules count: FLOPs and parameters."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.predict.step_time.layouts import layout
from triaxis.engine.config.quantities.plan import parallel_sizes, stages_of
from triaxis.engine.telemetry.record.flops import hardware_flops_per_token
from triaxis.models.predict.step_time.facts import (
    head_gemm,
    layer_gemms,
    layer_work,
    parameters_of_ends,
    parameters_of_layer,
)
from triaxis.models.predict.step_time.implementation import OURS
from triaxis.models.predict.terms import recomputed_layers
from triaxis.models.specs import stage_specs

_SIZES = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}
LATENTS: dict[str, Any] = {"bias": "none", "position": "rope", "mla": _SIZES | {"q_lora_rank": 40}}
FROM_X: dict[str, Any] = LATENTS | {"mla": _SIZES}


@given(
    tp=st.sampled_from([1, 2, 4]),
    granularity=st.sampled_from(["none", "selective", "full"]),
    activation=st.sampled_from(["gelu", "swiglu"]),
    window=st.sampled_from([None, 64]),
    ahead=st.sampled_from([0, 2]),
)
def test_flops_are_those_that_telemetry_counts(
    tp: int, granularity: str, activation: str, window: int | None, ahead: int
) -> None:
    fields = {"activation": activation, "window": window, "mtp": {"num_layers": ahead} if ahead else None}
    # Without sequence parallelism each rank projects all tokens.
    config = layout(tp=tp, sp=bool(ahead) and tp > 1, recompute={"granularity": granularity}, model=fields)
    sizes = parallel_sizes(config)
    tokens = config.train.micro_batch_size * config.model.seq_length
    counted = (1 + ahead) * 3 * head_gemm(config, sizes).flops
    for stage in stages_of(config):
        again = recomputed_layers(config, stage)
        for place, layer in enumerate(stage.layers):
            work = layer_work(config, sizes, OURS, layer)
            once = sum(gemm.flops for gemm in work.gemms) + work.core_flops
            counted += 3 * once + (once if place < again else work.core_again * work.core_flops)
    layers = [len(stage.layers) for stage in stages_of(config)]
    assert counted * tp == pytest.approx(tokens * hardware_flops_per_token(config.model, config.recompute, layers))


def test_flops_of_latent_attention_are_those_that_telemetry_counts() -> None:
    for fields in (LATENTS, FROM_X):
        for recompute in ({}, {"granularity": "selective"}, {"granularity": "full"}):
            config = layout(tp=1, recompute=recompute, model=fields)
            sizes = parallel_sizes(config)
            counted = 3 * head_gemm(config, sizes).flops
            for layer in range(config.model.num_layers):
                work = layer_work(config, sizes, OURS, layer)
                once = sum(gemm.flops for gemm in work.gemms) + work.core_flops
                parts = work.core_again * work.core_flops + sum(gemm.flops for gemm in work.again_gemms)
                counted += 3 * once + (once if recompute.get("granularity") == "full" else parts)
            tokens = config.train.micro_batch_size * config.model.seq_length
            per_token = hardware_flops_per_token(config.model, config.recompute, [config.model.num_layers])
            assert counted == pytest.approx(tokens * per_token)


def test_parameters_of_a_rank_are_those_of_the_specs() -> None:
    config = layout(tp=1, pp=2)
    sizes = parallel_sizes(config)
    for stage in stages_of(config):
        layers = sum(parameters_of_layer(config, sizes, layer).all for layer in stage.layers)
        counted = layers + parameters_of_ends(config, sizes, stage).all
        assert counted == sum(spec.numel for spec in stage_specs(config.model, stage))


def test_few_key_heads_are_replicated() -> None:
    """With 2 key/value heads on 4 ranks each has one whole, of 8 query heads two."""
    config = layout(tp=4, model={"num_kv_heads": 2})
    gemms = layer_gemms(config, parallel_sizes(config))
    assert (gemms["attention.qkv"].n, gemms["attention.proj"].k) == ((2 + 2) * 16, 2 * 16)
