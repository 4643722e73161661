"""Hugging Face models with experts: sizes, both forms of their files, and what would be another model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lacking import need_package
from tests.models.interop.huggingface.published import LLAMA_LIKE
from tests.models.interop.huggingface.published_experts import PUBLISHED_EXPERTS
from tests.models.interop.huggingface.test_weights import (
    all_tensors,
    assert_identical,
    exported,
    imported,
    random_model,
    rewrite,
)
from triaxis.engine.checkpoint.import_weights import read_tensor
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.errors import CheckpointError, ConfigError
from triaxis.engine.telemetry.record.parameters import num_active
from triaxis.models.interop.huggingface.config import family_of, from_hugging_face, passed_over_notes, to_hugging_face
from triaxis.models.interop.huggingface.weights import open_folder, plan_export
from triaxis.models.specs import num_parameters

EXPERTS: dict[str, Any] = {
    **LLAMA_LIKE,
    "layers": ["moe"],
    "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 12},
}


def keys_of(name: str, **change: Any) -> dict[str, Any]:
    return PUBLISHED_EXPERTS[name][0] | change


def model_of(name: str, **change: Any) -> ModelConfig:
    return ModelConfig.model_validate(from_hugging_face(keys_of(name, **change))["model"])


def with_moe(**change: Any) -> ModelConfig:
    return ModelConfig.model_validate({**EXPERTS, "moe": EXPERTS["moe"] | change})


@pytest.mark.parametrize("name", PUBLISHED_EXPERTS)
def test_published_models_have_their_published_sizes_in_all_and_active(name: str) -> None:
    _, total, active = PUBLISHED_EXPERTS[name]
    model = model_of(name)
    assert (num_parameters(model), num_active(model)) == (total, active)
    moe = model.moe
    assert moe is not None
    layers = sum(kind.has_experts for kind in model.kinds)
    assert total - active == layers * (moe.num_experts - moe.top_k) * 3 * model.hidden_size * moe.ffn_hidden_size


@pytest.mark.parametrize("name", PUBLISHED_EXPERTS)
def test_there_and_back_is_the_same_model(name: str) -> None:
    keys, model = keys_of(name), model_of(name)
    assert family_of(model) == keys["model_type"]
    again, _ = to_hugging_face(model, family_of(model), dtype="bfloat16")
    explicit = {"num_kv_heads", "head_dim"} if model.mla is None else set()
    resolved = {"num_kv_heads": model.kv_heads, "head_dim": model.head_size}
    back = ModelConfig.model_validate(from_hugging_face(again)["model"])
    update = {field: resolved[field] for field in explicit & from_hugging_face(again)["model"].keys()}
    assert back == model.model_copy(update=update)
    of_experts = {key for key in keys if "expert" in key or "group" in key or "topk" in key} | {"intermediate_size"}
    assert {key: again[key] for key in of_experts if key in again} == {
        key: keys[key] for key in of_experts if key in again
    }
    assert {"num_experts_per_tok", "intermediate_size"} <= again.keys() & of_experts


def test_fields_reach_their_places() -> None:
    moe = model_of("deepseek_v3").moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.ffn_hidden_size, moe.shared_experts) == (256, 8, 2048, 1)
    assert (moe.score, moe.normalize, moe.scaling, moe.choice_bias) == ("sigmoid", True, 2.5, True)
    assert (moe.groups, moe.top_groups, moe.group_score) == (8, 4, "top2")
    moe = model_of("deepseek_v2_lite", topk_method="group_limited_greedy", n_group=8, topk_group=3).moe
    assert moe is not None and (moe.groups, moe.top_groups, moe.group_score, moe.score) == (8, 3, "max", "softmax")
    moe = model_of("deepseek_v2_lite", n_group=8, topk_group=3).moe
    assert moe is not None and (moe.groups, moe.top_groups) == (1, 1), "greedy chooses among all experts"
    moe = model_of("mixtral_8x7b").moe
    assert moe is not None and (moe.num_experts, moe.top_k, moe.normalize) == (8, 2, True)
    moe = model_of("olmoe_1b_7b").moe
    assert moe is not None and not moe.normalize


def test_layers_with_experts_are_those_of_the_file() -> None:
    def dense(model: ModelConfig) -> list[int]:
        return [number for number, kind in enumerate(model.kinds) if not kind.has_experts]

    assert dense(model_of("deepseek_v3")) == [0, 1, 2]
    assert dense(model_of("qwen3_30b_a3b", mlp_only_layers=[4, 40])) == [4, 40]
    every_third = model_of("qwen3_30b_a3b", decoder_sparse_step=3, mlp_only_layers=[2])
    assert dense(every_third) == [layer for layer in range(48) if layer % 3 != 2 or layer == 2]
    keys, _ = to_hugging_face(every_third, "qwen3_moe", dtype="bfloat16")
    assert (keys["decoder_sparse_step"], keys["mlp_only_layers"]) == (1, dense(every_third))
    assert model_of("deepseek_v3", first_k_dense_replace=61).moe is None
    other = ModelConfig.model_validate({**EXPERTS, "qk_norm": True, "num_layers": 3, "layers": ["moe", "dense", "moe"]})
    assert family_of(other) == "qwen3_moe", "mixtral has experts in every layer"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("mixtral_8x7b", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1: noise on the input of routers"),
        ("mixtral_8x7b", {"num_local_experts": "eight"}, r"model\.moe\.num_experts = 'eight'"),
        ("mixtral_8x7b", {"num_local_experts": 1}, r"model\.moe\.num_experts = 1"),
        ("mixtral_8x7b", {"expert_capacity": 64}, "expert_capacity = 64: experts that leave tokens out"),
        ("qwen3_30b_a3b", {"shared_expert_intermediate_size": 64}, "shared experts behind a gate of their own"),
        ("qwen3_30b_a3b", {"num_local_experts": 64}, "num_experts = 128 and num_local_experts = 64: both are"),
        ("qwen3_30b_a3b", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0: must be a whole number of at least 1"),
        ("qwen3_30b_a3b", {"mlp_only_layers": 3}, "mlp_only_layers = 3: must be a list of layers"),
        ("olmoe_1b_7b", {"clip_qkv": 8.0}, "clip_qkv = 8.0: queries, keys and values that are clipped"),
        (
            "deepseek_v2_lite",
            {"num_experts_per_tok": None},
            r"num_experts_per_tok is missing: it is our model\.moe\.top_k",
        ),
        ("deepseek_v2_lite", {"norm_topk_prob": True}, "norm_topk_prob = True: transformers divides by no sum"),
        ("deepseek_v2_lite", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc': must be greedy or group_limited"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy': transformers has groups by their best two"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax': transformers has sigmoid scores"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2: transformers has experts in every layer"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1: must be a whole number"),
    ],
)
def test_what_would_be_another_model_is_refused(name: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_hugging_face(keys_of(name, **change))


@pytest.mark.parametrize(
    ("family", "model", "words"),
    [
        ("llama", with_moe(), r"model\.moe = .*which it does not have"),
        ("mixtral", ModelConfig.model_validate(LLAMA_LIKE), r"model\.moe = null, there every layer has experts"),
        ("mixtral", with_moe(scaling=2), r"model\.moe\.scaling = 2\.0, which it does not have"),
        ("mixtral", with_moe(normalize=False), r"model\.moe\.normalize = False, there it is True"),
        ("mixtral", with_moe(shared_experts=1), r"model\.moe\.shared_experts = 1, which it does not have"),
        ("mixtral", with_moe(force_balanced=True), r"model\.moe\.force_balanced = True, which it does not have"),
        ("mixtral", with_moe(balance={"bias_rate": 0.001}), "a bias of the choice .*which it does not have"),
        (
            "deepseek_v3",
            with_moe(score="sigmoid"),
            "no bias of the choice, there is one.*shared_experts = 0, there is at",
        ),
        ("deepseek_v2", with_moe(groups=2), r"model\.moe\.group_score = top2, there it is max"),
        (
            "mixtral",
            ModelConfig.model_validate({**EXPERTS, "layers": ["moe", "dense"]}),
            "layer 1 without experts, there every layer has some",
        ),
        (
            "deepseek_v2",
            ModelConfig.model_validate({**EXPERTS, "layers": ["moe", "dense"]}),
            "layer 1 without experts comes after layers with experts",
        ),
        (
            "mixtral",
            ModelConfig.model_validate(
                {
                    **EXPERTS,
                    "layers": ["moe", "local"],
                    "layer_kinds": {"local": {"window": 3, "mlp": "moe"}},
                }
            ),
            "windows on some layers, there all layers are alike",
        ),
    ],
)
def test_what_a_family_cannot_express_is_refused_by_name(family: str, model: ModelConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        family_of(model, family)


def test_losses_of_training_alone_are_said_on_both_ways() -> None:
    assert passed_over_notes(keys_of("mixtral_8x7b")) == [
        "router_aux_loss_coef = 0.02 acts in training only and is not taken over: model.moe.balance has the losses of Triaxis"
    ]
    assert passed_over_notes(keys_of("mixtral_8x7b", router_aux_loss_coef=0.0)) == []
    _, notes = to_hugging_face(with_moe(balance={"z_loss": 0.1}), "mixtral", dtype="float32")
    assert notes == ["model.moe.balance has no keys in mixtral: it acts in training only"]


@pytest.fixture
def _transformers() -> None:
    need_package("transformers", "pip install -e '.[dev]'")


@pytest.mark.usefixtures("_transformers")
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3_experts"])
def test_experts_in_one_tensor_are_read_as_those_in_many(name: str, tmp_path: Path) -> None:
    """Every expert's bytes: those of both forms, in our tensors and in the export."""
    model = random_model(name)
    model.save_pretrained(tmp_path / "each")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    stacked = all_tensors(tmp_path / "stacked")
    layer = "model.layers.2.mlp.experts"
    assert f"{layer}.gate_up_proj" in stacked and not any("experts.0." in key for key in stacked)
    one, other = imported(tmp_path / "each", tmp_path / "a"), imported(tmp_path / "stacked", tmp_path / "b")
    assert one.manifest.fingerprint == other.manifest.fingerprint
    gate_up = read_tensor(one.folder, one.manifest, "layers.2.mlp.experts.gate_up.weight")
    assert torch.equal(gate_up.flatten(1, 2), stacked[f"{layer}.gate_up_proj"])
    down = read_tensor(one.folder, one.manifest, "layers.2.mlp.experts.down.weight")
    assert torch.equal(down, stacked[f"{layer}.down_proj"])
    assert_identical(all_tensors(exported(other, tmp_path / "target")), all_tensors(tmp_path / "each"))


@pytest.mark.usefixtures("_transformers")
def test_an_expert_that_is_missing_or_misshapen_is_named(tmp_path: Path) -> None:
    random_model("qwen3_moe").save_pretrained(tmp_path)
    rewrite(
        tmp_path,
        model__layers__1__mlp__experts__5__up_proj__weight=None,
        model__layers__2__mlp__experts__0__down_proj__weight=torch.ones(24, 13),
        model__layers__0__mlp__experts__6__up_proj__weight=torch.ones(12, 24),
    )
    with pytest.raises(CheckpointError) as caught:
        open_folder(tmp_path)
    for words in (
        "model.layers.1.mlp.experts.5.up_proj.weight [12, 24] is missing",
        "model.layers.2.mlp.experts.0.down_proj.weight has the shape [24, 13]; the config makes it [24, 12]",
        "model.layers.0.mlp.experts.6.up_proj.weight [12, 24] is not a tensor of this model",
    ):
        assert words in str(caught.value)


@pytest.mark.usefixtures("_transformers")
def test_the_bias_of_a_choice_stays_in_fp32(tmp_path: Path) -> None:
    """Its steps are of 0.001: bf16 would lose them."""
    name = "layers.2.mlp.router.bias"
    model = random_model("deepseek_v3_experts").float()
    model.save_pretrained(tmp_path / "source")
    candidate = imported(tmp_path / "source", tmp_path / "ours", torch.bfloat16)
    assert read_tensor(candidate.folder, candidate.manifest, "layers.2.mlp.router.weight").dtype == torch.bfloat16
    bias = all_tensors(tmp_path / "source")["model.layers.2.mlp.gate.e_score_correction_bias"]
    assert bias.abs().min() > 0 and torch.equal(read_tensor(candidate.folder, candidate.manifest, name), bias)
    ours = ModelConfig.model_validate(candidate.manifest.config["model"])
    plans = plan_export(candidate, "deepseek_v3", ours, torch.bfloat16).plans
    assert {plan.dtype for plan in plans if plan.name.endswith("e_score_correction_bias")} == {"F32"}
    assert {plan.dtype for plan in plans if not plan.name.endswith("e_score_correction_bias")} == {"BF16"}
