"""The parameter formula against the models' own list of parameters, and counting over the ranks of a layout."""

from itertools import product
from typing import Any

import pytest

from tests.documented import ROOT
from triaxis.engine.config.load import load_config
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.layout.partition import partition
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.layout.shard_spec import REDUCE_AXES, localize
from triaxis.engine.telemetry.record.parameters import (
    MODULES,
    comparison,
    local_counts,
    module_of,
    num_active,
    parameters_by_module,
    round_counts,
)
from triaxis.models.specs import model_specs, stage_specs


def model(**fields: Any) -> ModelConfig:
    small: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "ffn_hidden_size": 80,
        "seq_length": 32,
        "vocab_size": 100,
        "vocab_multiple": 64,
    }
    return ModelConfig(**small | fields)


def counted_by_specs(config: ModelConfig) -> dict[str, int]:
    counts = dict.fromkeys(MODULES, 0)
    for spec in model_specs(config):
        counts[module_of(spec.name)] += spec.numel
    return counts


def test_the_formula_equals_the_list_of_parameters_for_every_combination_of_options() -> None:
    options: dict[str, tuple[Any, ...]] = {
        "norm": ("layernorm", "rmsnorm"),
        "norm_placement": ("before", "after", "both"),
        "activation": ("gelu", "swiglu"),
        "position": ("learned", "rope"),
        "tie_embeddings": (True, False),
        "bias": ("all", "qkv", "none"),
        "qk_norm": (True, False, "all_heads"),
        "num_kv_heads": (None, 2),
        "head_dim": (None, 20),
    }
    for values in product(*options.values()):
        config = model(**dict(zip(options, values, strict=True)))
        assert parameters_by_module(config) == counted_by_specs(config), config


LATENTS = {"kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14}


@pytest.mark.parametrize("q_lora_rank", [None, 24])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_latents_count_as_the_list_of_parameters(q_lora_rank: int | None, norm: str) -> None:
    config = model(bias="none", norm=norm, mla={"q_lora_rank": q_lora_rank, **LATENTS})
    assert parameters_by_module(config) == counted_by_specs(config)


def test_sinks_count_in_the_layers_that_have_them() -> None:
    kinds = {"layers": ["a*2", "b"], "layer_kinds": {"a": {"sinks": True}, "b": {}}}
    config, plain = model(**kinds), model()
    assert parameters_by_module(config) == counted_by_specs(config)
    assert parameters_by_module(config)["attention"] == parameters_by_module(plain)["attention"] + 3 * 4


DEEPSEEK: dict[str, Any] = {
    "layers": ["dense", "moe*3"],
    "moe": {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 24, "shared_experts": 2, "choice_bias": True},
    "activation": "swiglu",
    "bias": "none",
}


def test_experts_count_in_the_layers_that_have_them() -> None:
    for changed in ({}, {"activation": "gelu"}, {"moe": DEEPSEEK["moe"] | {"choice_bias": False, "shared_experts": 0}}):
        config = model(**DEEPSEEK | changed)
        assert parameters_by_module(config) == counted_by_specs(config)


def test_tokens_ahead_have_a_layer_each_and_what_joins_it() -> None:
    for changed in ({}, {"norm": "layernorm"}, {"tie_embeddings": False}, {"activation": "gelu"}):
        config = model(**DEEPSEEK | changed | {"mtp": {"num_layers": 2}})
        assert parameters_by_module(config) == counted_by_specs(config)
    v3 = load_config(ROOT / "configs" / "deepseek_v3.yaml").model
    alone = v3.model_copy(update={"mtp": None})
    total, projection = sum(parameters_by_module(alone).values()), 2 * v3.hidden_size**2
    unique, active = sum(parameters_by_module(v3).values()) - total, num_active(v3) - num_active(alone)
    # DeepSeek-V3's README_WEIGHTS: 671B, and 11.5B "unique" and 1.5B "activation" parameters, the projection in neither of them.
    assert (round(total / 1e9), f"{(unique - projection) / 1e9:.1f}") == (671, "11.5")
    # The head is among the latter: it is used again, and no parameter more.
    assert f"{(active - projection + v3.vocab_size * v3.hidden_size) / 1e9:.1f}" == "1.5"


MOE = {"norm": "rmsnorm", "bias": "none", "activation": "swiglu", "tie_embeddings": False, "layers": ["moe"]}


def test_published_totals_of_experts_and_what_a_token_uses_of_them() -> None:
    """Mixtral 8x7B: 47B and 13B (2401.04088); Qwen3-30B-A3B: 30.5B and 3.3B (its model card)."""
    mixtral = model(
        **MOE,
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_kv_heads=8,
        vocab_size=32000,
        moe={"num_experts": 8, "top_k": 2, "ffn_hidden_size": 14336},
    )
    assert sum(parameters_by_module(mixtral).values()) == 46_702_792_704
    assert f"{num_active(mixtral) / 1e9:.1f}" == "12.9"
    qwen = model(
        **MOE,
        num_layers=48,
        hidden_size=2048,
        num_attention_heads=32,
        num_kv_heads=4,
        head_dim=128,
        qk_norm=True,
        vocab_size=151936,
        moe={"num_experts": 128, "top_k": 8, "ffn_hidden_size": 768},
    )
    assert f"{sum(parameters_by_module(qwen).values()) / 1e9:.1f}" == "30.5"
    assert f"{num_active(qwen) / 1e9:.2f}" == "3.35"


def test_published_totals() -> None:
    gpt = model(
        num_layers=24, hidden_size=2048, num_attention_heads=16, ffn_hidden_size=8192, seq_length=2048, vocab_size=50304
    )
    assert f"{sum(parameters_by_module(gpt).values()) / 1e9:.3f}" == "1.312"
    llama = model(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=14336,
        seq_length=8192,
        vocab_size=128256,
        activation="swiglu",
        norm="rmsnorm",
        bias="none",
        tie_embeddings=False,
    )
    assert sum(parameters_by_module(llama).values()) == 8_030_261_248


@pytest.mark.parametrize(
    ("tp", "pp", "vpp", "dp", "fields"),
    [
        (1, 1, 1, 1, {}),
        (2, 2, 2, 2, {}),
        (4, 1, 1, 2, {"num_kv_heads": 2}),
        (4, 2, 1, 1, {"num_kv_heads": 1, "tie_embeddings": False, "position": "learned"}),
        (1, 4, 1, 3, {"qk_norm": True, "bias": "none"}),
        (2, 1, 1, 1, {"activation": "swiglu", "norm": "rmsnorm"}),
        (2, 2, 1, 4, DEEPSEEK),
    ],
)
def test_shares_of_all_ranks_add_up_to_the_formula_in_every_layout(
    tp: int, pp: int, vpp: int, dp: int, fields: dict[str, Any]
) -> None:
    config = model(**fields)
    stages = partition(config.num_layers, pp, vpp, None)
    ep, etp = (2, tp) if config.has_experts else (1, 1)
    sizes = ParallelSizes(tp=tp, pp=pp, dp=dp, vpp=vpp, ep=ep, etp=etp)
    grid = RankGrid(sizes, ranks_per_node=tp * pp * dp)
    owners = {axis: sizes.reduce_size(axis) for axis in REDUCE_AXES}
    replicas = {"tp": tp, "kv_replicas": max(1, tp // config.kv_heads), "ends": min(pp, 2)}
    sums = dict.fromkeys(MODULES, 0.0)
    for rank in range(tp * pp * dp):
        at = grid.coordinates(rank)
        specs = {spec.name: spec for chunk in range(vpp) for spec in stage_specs(config, stages[chunk * pp + at.pp])}
        place = sizes.expert_place(rank)
        records = [
            localize(spec, tp=tp, tp_index=at.tp, sequence_parallel=False, experts=place) for spec in specs.values()
        ]
        for module, share in local_counts(records, owners, replicas).items():
            sums[module] += share
    assert round_counts(sums) == parameters_by_module(config)


def listed_by_specs(config: ModelConfig) -> dict[str, int]:
    return {spec.name: spec.numel for spec in model_specs(config)}


def test_a_difference_is_named_by_module() -> None:
    config = model()
    counted, listed = parameters_by_module(config), listed_by_specs(config)
    same = comparison(counted, listed, config)
    assert same[0].partition(":")[0] == f"{sum(counted.values()):,} counted = {sum(counted.values()):,} by the formula"

    counted["mlp"] -= 80
    total, *wrong = comparison(counted, listed, config)
    assert "not the configured one" in total
    assert wrong == [f"mlp: {counted['mlp']:,} counted, {counted['mlp'] + 80:,} listed"]


@pytest.mark.parametrize(
    ("fields", "changed", "said"),
    [
        # As many elements as the bias of `down` has, which is no reason to name that.
        ({}, {f"layers.{layer}.mlp.scale": 48 for layer in range(4)}, "192 more {} layers.*.mlp.scale"),
        (
            DEEPSEEK | {"mtp": {"num_layers": 1}, "qk_norm": True},
            {"layers.1.attention.temperature": 4, "layers.1.gate.weight": 9, "start.own_norm.weight": 5},
            "18 more {} layers.*.attention.temperature, start.own_norm.weight, layers.*.gate.weight",
        ),
        (
            {"mla": LATENTS, "bias": "none", "norm_placement": "both"},
            {"layers.1.mlp.down.weight": 48 * 81},
            "48 more {} mlp",
        ),
        ({}, {"layers.1.mlp.up.bias": 79, "layers.1.mlp.own.up.bias": 0}, "1 fewer {} mlp"),
    ],
)
def test_a_changed_list_is_named_by_its_names(fields: dict[str, Any], changed: dict[str, int], said: str) -> None:
    config = model(**fields)
    listed = listed_by_specs(config) | changed
    counted = dict.fromkeys(MODULES, 0)
    for name, numel in listed.items():
        counted[module_of(name)] += numel
    total = f"{sum(listed.values()):,} parameters: "
    assert comparison(counted, listed, config)[0] == total + said.format("than this configuration's formula, in")
