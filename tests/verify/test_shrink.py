"""A shrunk configuration is legal, small, and keeps the relations between sizes from which layout bugs come."""

import math
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.documented import ROOT
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import stages_of
from triaxis.engine.config.quantities.update_settings import is_frozen
from triaxis.engine.config.rules.check import problems
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.partition import partition
from triaxis.launch.verify.relations import RELATIONS, relations, rows_of_ranks
from triaxis.launch.verify.shrink import shrink
from triaxis.models.specs import layer_specs

GROUPS: tuple[dict[str, Any], ...] = (
    {"match": "layers.[2-3].*", "freeze": True},
    {"match": "layers.*[05].mlp.*", "lr_factor": 0.5},
    {"match": "layers.1?.attention.proj.weight", "lr_factor": 0.25},
    {"match": "*norm.weight", "weight_decay": 0.3},
)
WITHIN = {"attention": "within", "positions": "document", "synthetic_document_length": 100}


@st.composite
def _kinds(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a model whose layers repeat a pattern; or of one whose layers are alike."""
    pattern = draw(st.lists(st.sampled_from(["near", "far"]), max_size=7))
    kinds = {"near": {"window": 16}, "far": {"sinks": True}}
    return {"layers": pattern, "layer_kinds": {name: kinds[name] for name in pattern}} if pattern else {}


@st.composite
def configs(draw: st.DrawFn) -> Config:
    tp, pp, vpp, dp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4, 8), (1, 2, 4), (1, 2, 3), (1, 2, 3)))
    vpp = vpp if pp > 1 else 1
    cp = draw(st.sampled_from([1, 1, 2, 4]))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8, 16, 32, 5 * tp]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3, 8]))
    while heads % tp:
        heads *= 2
    stages = pp * vpp
    layers = draw(st.integers(stages, 9 * stages))
    layers_per_stage = None
    if draw(st.booleans()):
        layers_per_stage = [draw(st.integers(0, 9)) for _ in range(stages)]
        layers = sum(layers_per_stage)
        assume(layers)
    most = max(layers_per_stage or [-(-layers // stages)])
    granularity = draw(st.sampled_from(["none", "full"]))
    recompute = {"granularity": granularity, "head_tokens": draw(st.none() | st.integers(1, 20000))}
    if granularity == "full":
        recompute |= {
            "method": draw(st.sampled_from(["uniform", "block"])),
            "num_layers": draw(st.integers(1, most)),
        }
    head_dim = draw(st.sampled_from([None, 64]))
    multiple = draw(st.sampled_from([8, 64, 128, 1024]))
    methods = ["ulysses"] if max(1, kv_heads // tp) % cp == 0 else []
    experts = _experts(draw, tp, tp * cp * dp) if draw(st.booleans()) else None
    kinds = {} if experts is not None else draw(_kinds())
    groups = draw(st.lists(st.sampled_from(GROUPS), max_size=2, unique_by=lambda group: group["match"]))
    micro = draw(st.integers(1, 4))
    num_microbatches = pp * draw(st.integers(1, 9)) if vpp > 1 else draw(st.integers(1, 20))
    return Config.model_validate(
        {
            "model": {
                "num_layers": layers,
                "hidden_size": 32 * heads * (draw(st.sampled_from([1, 2, 3])) if head_dim else 2),
                "num_attention_heads": heads,
                "num_kv_heads": kv_heads,
                "head_dim": head_dim,
                "ffn_hidden_size": 8 * draw(st.integers(1, 500)),
                "seq_length": draw(st.integers(1, 500)) * draw(st.sampled_from([1, 8] if cp == 1 else [2 * cp * tp])),
                "vocab_size": draw(st.integers(1, 3000) | st.integers(20, 50000)),
                "vocab_multiple": multiple,
                **({} if experts is None else {"bias": "none", **experts[0]}),
                **kinds,
                **draw(st.sampled_from([{}, {"mtp": {"num_layers": 3, "loss_weight": 0.5}}])),
            },
            "optimizer": {"groups": groups},
            "data": {"synthetic": True} | (draw(st.sampled_from([{}, WITHIN])) if cp > 1 else {}),
            "train": {"steps": 1, "micro_batch_size": micro, "global_batch_size": num_microbatches * micro * dp},
            "parallel": {
                "tp": tp,
                "pp": pp,
                "vpp": vpp,
                "dp": dp,
                "cp": cp,
                "cp_method": draw(st.sampled_from(["auto", "all_gather", *methods])),
                "sequence_parallel": tp > 1 and draw(st.booleans()),
                "layers_per_stage": layers_per_stage,
                **({} if experts is None else experts[1]),
            },
            "recompute": recompute,
            "offload": {"num_layers": draw(st.just(0) | st.integers(0, most))},
        }
    )


def _experts(draw: st.DrawFn, tp: int, num_ranks: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Fields of the model and of the layout; not every draw is legal."""
    etp = draw(st.sampled_from([1, tp]))
    ep = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8, 16) if num_ranks % (n * etp) == 0]))
    groups = draw(st.sampled_from([1, 1, 2, 4, 8]))
    num_experts = math.lcm(ep, groups) * draw(st.sampled_from([1, 2, 3, 8]))
    assume(num_experts > 1)
    top_groups = draw(st.integers(1, groups))
    moe = {
        "num_experts": num_experts,
        "groups": groups,
        "top_groups": top_groups,
        "top_k": draw(st.integers(1, min(8, top_groups * num_experts // groups))),
        "group_score": draw(st.sampled_from(["max", "top2"])),
        "ffn_hidden_size": 64 * tp,
        "shared_experts": draw(st.integers(0, 3)),
    }
    return {"layers": draw(st.sampled_from([["moe"], ["dense", "moe"]])), "moe": moe}, {"ep": ep, "etp": etp}


def shrunk(config: Config) -> Config:
    tree: dict[str, Any] = config.model_dump(mode="json")
    for section, values in shrink(config).items():
        tree[section] |= values
    return Config.model_validate(tree)


@settings(max_examples=300, deadline=None)
@given(configs())
def test_relations_are_kept_and_sizes_are_not(config: Config) -> None:
    assume(not problems(config))
    small = shrunk(config)
    assert problems(small) == []
    before, after = relations(config), relations(small)
    assert {name: (before[name], after[name]) for name in RELATIONS if before[name] != after[name]} == {}
    model, sizes = small.model, small.parallel
    # With cp: exchanged heads are a multiple of it; pieces that differ are of five heads.
    assert model.num_attention_heads <= (4 if sizes.cp == 1 else 16) * max(sizes.tp, 4) and model.head_size == 8
    assert len(partition(model.num_layers, sizes.pp, sizes.vpp, sizes.layers_per_stage)) == sizes.pp * sizes.vpp
    assert model.padded_vocab_size <= 40 + 8 * sizes.tp
    # With cp: eight blocks for each rank, whose tokens tp divides.
    most = 3 * sizes.tp + 2 if sizes.cp == 1 else 8 * sizes.cp * sizes.tp
    assert model.seq_length <= max(8, 2 * sizes.tp) + most
    stages = sizes.pp * sizes.vpp
    # The largest: groups of 3 with a border of what is offloaded in the second leave stages of 7 and of 8 layers.
    is_bounded = sizes.layers_per_stage is None and model.layers is None and not small.optimizer.groups
    assert not is_bounded or model.num_layers <= 8 * stages
    if model.moe is not None:
        # Twice over: more on a rank than a token chooses, of which there are more than ranks or than a group has.
        assert model.moe.num_experts <= 8 * sizes.ep + 16 and model.moe.ffn_hidden_size <= max(20, 16 * sizes.tp)


def _gpt_tiny(*words: str) -> Config:
    return load_config(ROOT / "configs" / "gpt_tiny.yaml", ("parallel.dp=1", *words))


def test_kinds_of_layers_stay_what_they_are() -> None:
    """Of a large model, the two kinds of layers occur in four, and their windows and frequencies are still such."""
    longrope = {
        "type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 100,
        "short_factor": [1.0] * 12,
        "long_factor": [2.0] * 12,
    }
    kinds = {"local": {"window": 100, "rotary_share": 0.75}, "global": {"sinks": True, "rope_scaling": longrope}}
    words = ("num_layers=12", "layers=[local*5, global]", f"layer_kinds={kinds}", "position=rope", "head_dim=24")
    large = _gpt_tiny("parallel.pp=2", "parallel.vpp=1", "parallel.tp=1", *(f"model.{word}" for word in words))
    small = shrunk(large)
    assert problems(with_value(small, "model.vocab_size", 257)) == [], "but for the tokenizer's own ids"
    assert relations(large)["kinds of layers"] == relations(small)["kinds of layers"]
    assert [kind.name for kind in small.model.kinds] == ["local", "global"] * (small.model.num_layers // 2)


def _patterned(pattern: str, num_layers: int, *words: str) -> Config:
    kinds = "model.layer_kinds={local: {window: 4}, global: {}}"
    return _gpt_tiny(f"model.layers=[{pattern}]", f"model.num_layers={num_layers}", kinds, "parallel.tp=1", *words)


@pytest.mark.parametrize(
    ("pattern", "num_layers", "pp", "vpp", "stages"),
    [
        ("local, global", 42, 2, 1, ["lgl", "glg"]),
        ("local*3, global", 36, 2, 1, ["lllgl", "lglll"]),
        ("local*2, global", 8, 2, 2, ["ll", "gl", "lg", "ll"]),
        ("local*5, global", 12, 2, 1, ["lg", "lg"]),
        ("local*3, global", 12, 1, 1, ["lgl"]),
    ],
)
def test_each_stage_begins_where_it_did_in_the_pattern(
    pattern: str, num_layers: int, pp: int, vpp: int, stages: list[str]
) -> None:
    small = shrunk(_patterned(pattern, num_layers, f"parallel.pp={pp}", f"parallel.vpp={vpp}"))
    names = "".join(kind.name[0] for kind in small.model.kinds)
    assert [names[stage.layers.start : stage.layers.stop] for stage in stages_of(small)] == stages


def test_a_parameter_keeps_its_group_under_another_number() -> None:
    groups = "optimizer.groups=[{match: 'layers.[4-7].*', freeze: true}, {match: 'layers.11.mlp.*', lr_factor: 0.5}]"
    small = shrunk(_gpt_tiny("model.num_layers=12", "parallel.pp=2", "parallel.vpp=1", groups))
    # Layers 0 2 4 5 of either stage; of the last one, the MLP has a rate of its own.
    frozen = [
        layer
        for layer in range(small.model.num_layers)
        if is_frozen(f"layers.{layer}.mlp.norm.weight", small.optimizer)
    ]
    slow = {group["match"] for group in small.optimizer.groups if "lr_factor" in group}
    assert (small.model.num_layers, frozen) == (8, [2, 3, 4])
    assert slow == {spec.name for spec in layer_specs(small.model, 7) if ".mlp." in spec.name}


def test_three_offloaded_layers_stay_three() -> None:
    small = shrunk(_gpt_tiny("offload.num_layers=4", "model.num_layers=12", "parallel.pp=2", "parallel.vpp=1"))
    assert (small.model.num_layers, small.offload.num_layers) == (8, 3)


@pytest.mark.parametrize("q_lora_rank", ["1536", "null"])
@pytest.mark.parametrize("v_head_dim", [128, 192])
def test_latents_stay_latents(q_lora_rank: str, v_head_dim: int) -> None:
    sizes = f"q_lora_rank: {q_lora_rank}, kv_lora_rank: 512, qk_nope_head_dim: 128, qk_rope_head_dim: 64, v_head_dim: {v_head_dim}"
    words = ("hidden_size=7168", "num_attention_heads=128", "position=rope", "bias=none", f"mla={{{sizes}}}")
    large = _gpt_tiny("parallel.tp=4", "parallel.cp=2", *(f"model.{word}" for word in words))
    small = shrunk(large)
    assert problems(with_value(small, "model.vocab_size", 257)) == [], "but for the tokenizer's own ids"
    assert relations(large) == relations(small)
    assert small.model.mla is not None and (small.model.mla.latent_size <= 20, small.model.head_size) == (True, 8)


def test_a_rank_of_padding_stays_one() -> None:
    small = shrunk(_gpt_tiny("parallel.tp=4", "parallel.pp=1", "parallel.vpp=1")).model
    found = rows_of_ranks(small.vocab_size, small.padded_vocab_size, 4)
    assert found == ("whole", "whole", "partly padding", "all padding")


def test_a_last_group_with_fewer_layers_stays_one() -> None:
    words = ("recompute.granularity=full", "recompute.num_layers=5", "offload.num_layers=5", "model.num_layers=14")
    small = shrunk(_gpt_tiny("parallel.pp=2", "parallel.vpp=1", *words))
    assert (small.model.num_layers, small.recompute.num_layers, small.offload.num_layers) == (6, 2, 2)


def test_three_rounds_of_microbatches_stay_three() -> None:
    """A microbatch is 4 samples, a round is 2 of them, and the last round has one."""
    small = shrunk(_gpt_tiny("parallel.pp=2", "parallel.vpp=1", "train.global_batch_size=84"))
    assert small.train.global_batch_size == 7 * small.train.micro_batch_size
