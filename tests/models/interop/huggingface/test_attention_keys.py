"""RoPE, windows and kinds of layers in a config.json: read in every spelling, written back, refused where a family lacks them."""

import json
from typing import Any

import pytest

from tests.models.interop.huggingface.published import GEMMA_LIKE, LLAMA_LIKE, PUBLISHED, model_of, without
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.errors import ConfigError
from triaxis.engine.kernels.rotary import rotary_factor
from triaxis.models.interop.huggingface.config import family_of, from_hugging_face, to_hugging_face


def test_layers_of_a_smollm3_do_not_all_rotate() -> None:
    model = model_of("smollm3_3b")
    assert [kind.rotary is None for kind in model.kinds] == ([False] * 3 + [True]) * 9
    keys = without(PUBLISHED["smollm3_3b"][0], "no_rope_layers", "layer_types")
    assert ModelConfig.model_validate(from_hugging_face(keys)["model"]) == model
    windows = from_hugging_face({**keys, "use_sliding_window": True, "sliding_window": 8})["model"]
    kinds = ModelConfig.model_validate(windows).kinds
    assert [kind.window for kind in kinds] == [None, None, None, 8] * 9, "layers without RoPE have the window"
    with pytest.raises(ConfigError, match="no_rope_layers has 2 entries for 36 layers"):
        from_hugging_face({**keys, "no_rope_layers": [1, 0]})


def test_a_part_of_a_head_rotates() -> None:
    assert model_of("pythia_1.4b").rotary_share == 0.25
    later = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    keys = without(PUBLISHED["pythia_1.4b"][0], "rotary_pct", "rotary_emb_base")
    assert from_hugging_face({**keys, **later})["model"]["rotary_share"] == 0.5
    with pytest.raises(ConfigError, match=r"partial_rotary_factor = 0\.5, and elsewhere it is 0\.25 \(rotary_pct\)"):
        from_hugging_face({**keys, **later, "rotary_pct": 0.25})
    assert model_of("phi3_mini", partial_rotary_factor=0.75).rotary_share == 0.75
    with pytest.raises(ConfigError, match=r"attention_bias = False: attention without biases"):
        model_of("pythia_1.4b", attention_bias=False)


def test_longrope_of_a_phi3_has_the_file_s_lengths() -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    model = model_of("phi3_mini", max_position_embeddings=131072, rope_scaling=scaling)
    assert model.rope_scaling is not None and model.rope_scaling.type == "longrope"
    assert (model.rope_scaling.factor, model.rope_scaling.original_max_position_embeddings) == (32.0, 4096)
    keys, _ = to_hugging_face(model, "phi3", dtype="bfloat16")
    assert keys["rope_scaling"] == {**scaling, "type": "longrope"}, "the three fields that transformers 4 wants"
    assert (keys["max_position_embeddings"], keys["original_max_position_embeddings"]) == (131072, 4096)
    shorter, _ = to_hugging_face(model.model_copy(update={"seq_length": 8192}), "phi3", dtype="bfloat16")
    assert shorter == keys, "trained on shorter texts, it is the same model"


def test_longrope_is_the_same_in_transformers_4() -> None:
    """There the length of pretraining is read at the top alone, and the factor is the ratio of the lengths there."""
    scaling = {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    model = model_of("phi3_mini", max_position_embeddings=131072, rope_scaling=scaling)
    for seq_length in (4096, 8192, 131072):
        keys, _ = to_hugging_face(model.model_copy(update={"seq_length": seq_length}), "llama", dtype="bfloat16")
        assert (keys["max_position_embeddings"], keys["original_max_position_embeddings"]) == (131072, 4096)
        assert "attention_factor" not in keys["rope_scaling"]
    assert model.rope_scaling is not None
    uneven = model.model_copy(update={"rope_scaling": model.rope_scaling.model_copy(update={"factor": 32.0001})})
    keys, _ = to_hugging_face(uneven, "llama", dtype="bfloat16")
    factor = keys["rope_scaling"]["attention_factor"]
    assert factor == rotary_factor(uneven.kinds[0].rotary), "no ratio of whole lengths"


def test_types_of_layers_need_a_rope_each() -> None:
    with pytest.raises(ConfigError, match="RoPE of this form is not built yet"):
        model_of("gemma3_1b", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    with pytest.raises(ConfigError, match="rope_scaling = 'linear': must be a mapping"):
        model_of("gemma3_1b", rope_scaling="linear")
    with pytest.raises(ConfigError, match=r"rope_scaling = .*this family has no RoPE"):
        model_of("gpt2", rope_scaling={"type": "linear", "factor": 2.0})


def test_a_mistral_without_the_key_has_a_window() -> None:
    keys = without(PUBLISHED["mistral_7b_v0.3"][0], "sliding_window")
    assert from_hugging_face(keys)["model"]["window"] == 4096
    assert "window" not in from_hugging_face(PUBLISHED["mistral_7b_v0.3"][0])["model"]


def test_windows_of_a_qwen_begin_at_a_layer() -> None:
    keys = {**PUBLISHED["qwen2.5_0.5b"][0], "use_sliding_window": True, "sliding_window": 1024}
    model = ModelConfig.model_validate(from_hugging_face({**keys, "max_window_layers": 20})["model"])
    assert [kind.window for kind in model.kinds] == [None] * 20 + [1024] * 4
    everywhere = from_hugging_face({**keys, "max_window_layers": 0})["model"]
    assert (everywhere["window"], "layers" in everywhere) == (1024, False)
    assert "window" not in from_hugging_face({**keys, "max_window_layers": 24})["model"]
    assert "window" not in from_hugging_face({**keys, "use_sliding_window": False})["model"]
    types = ["sliding_attention", "full_attention"] * 12
    model = ModelConfig.model_validate(from_hugging_face({**keys, "layer_types": types})["model"])
    assert [kind.window for kind in model.kinds] == [1024, None] * 12
    with pytest.raises(ConfigError, match="use_sliding_window or sliding_window switches it off"):
        from_hugging_face({**keys, "layer_types": types, "use_sliding_window": False})
    with pytest.raises(ConfigError, match="23 layer_types are given for 24 layers"):
        from_hugging_face({**keys, "layer_types": types[:23]})


LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
"""The scaling of Llama 3.1."""


def test_scaled_rope_is_read_in_every_form() -> None:
    keys = without(PUBLISHED["llama3_8b"][0], "rope_scaling")
    ours = {"type": "llama3", **without(LLAMA3_SCALING, "rope_type")}
    old = {**without(LLAMA3_SCALING, "rope_type"), "type": "llama3"}
    new = {**LLAMA3_SCALING, "rope_theta": 500000.0}
    for given in ({"rope_scaling": LLAMA3_SCALING}, {"rope_scaling": old}, {"rope_parameters": new}):
        assert from_hugging_face({**keys, **given})["model"]["rope_scaling"] == ours
    yarn = from_hugging_face({**PUBLISHED["qwen2.5_0.5b"][0], "rope_scaling": {"type": "yarn", "factor": 4.0}})["model"]
    # As in transformers: the length of the file is the original one, and seq_length.
    assert yarn["rope_scaling"] == {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    with pytest.raises(ConfigError, match="rope_parameters and rope_scaling differ"):
        from_hugging_face({**keys, "rope_scaling": LLAMA3_SCALING, "rope_parameters": {**new, "factor": 4.0}})
    with pytest.raises(ConfigError, match=r"model\.rope_scaling\.type = .*dynamic"):
        from_hugging_face({**keys, "rope_scaling": {"type": "dynamic", "factor": 2.0}})


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        (
            "mistral",
            {"window": 8, "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}},
        ),
        ("qwen2", {"bias": "qkv", "window": 8}),
        (
            "qwen3",
            {
                "qk_norm": True,
                "layers": ["full_attention*1", "sliding_attention*1"],
                "layer_kinds": {"full_attention": {}, "sliding_attention": {"window": 8}},
            },
        ),
    ],
)
def test_windows_and_scalings_go_there_and_back(family: str, fields: dict[str, Any]) -> None:
    model = ModelConfig.model_validate(LLAMA_LIKE | fields)
    assert family_of(model) == family
    keys, _ = to_hugging_face(model, family, dtype="float32")
    again = ModelConfig.model_validate(from_hugging_face(json.loads(json.dumps(keys)))["model"])
    assert again.kinds == model.kinds and again.rope_scaling == model.rope_scaling


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layers": ["a", "b"], "layer_kinds": {"a": {"window": 3}, "b": {"window": 4}}}, "windows of 3, 4 keys"),
        ({"layers": ["a"], "layer_kinds": {"a": {"rope_base": 5.0}}}, "layer_kinds.a has rope_base"),
        ({"layers": ["a"], "layer_kinds": {"a": {"sinks": True}}}, "attention sinks, which it does not have"),
    ],
)
def test_kinds_that_no_family_has_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        family_of(ModelConfig.model_validate(LLAMA_LIKE | {"qk_norm": True} | fields), "qwen3")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"layers": ["a", "b"], "layer_kinds": {"a": {"rope_base": 5.0}, "b": {}}},
            "layers without a window whose RoPE differs",
        ),
        (
            {
                "layers": ["a", "b"],
                "layer_kinds": {"a": {"window": 3, "rope_scaling": {"type": "linear", "factor": 2}}, "b": {}},
            },
            "a scaled RoPE in layers with a window",
        ),
        ({"attention_scale": 0.3}, r"attention_scale = 0\.3, which its query_pre_attn_scalar cannot express"),
        ({"embedding_multiplier": 3.0}, r"embedding_multiplier = 3\.0, there it is 4\.0 for model\.hidden_size = 16"),
        ({"hidden_size": 25, "head_dim": 4, "embedding_multiplier": 5.0}, "a multiple of num_attention_heads = 4"),
    ],
)
def test_what_a_gemma_cannot_express_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        family_of(ModelConfig.model_validate({**GEMMA_LIKE, "qk_norm": True} | fields), "gemma3_text")


def test_layer_types_that_are_not_built_are_refused() -> None:
    keys = {**PUBLISHED["qwen3_0.6b"][0], "layer_types": ["full_attention", "linear_attention"]}
    with pytest.raises(ConfigError, match="layer_types = linear_attention: only full_attention"):
        from_hugging_face(keys)


def test_rope_parameters_of_newer_files() -> None:
    keys = without(PUBLISHED["llama3_8b"][0], "rope_theta", "rope_scaling")
    rope = {"rope_theta": 7.0, "rope_type": "default"}
    assert from_hugging_face({**keys, "rope_parameters": rope})["model"]["rope_base"] == 7.0
    with pytest.raises(ConfigError, match="RoPE of this form is not built yet"):
        from_hugging_face({**keys, "rope_parameters": {**rope, "partial_rotary_factor": 0.5}})
    with pytest.raises(ConfigError, match="RoPE of this form is not built yet"):
        from_hugging_face({**keys, "rope_parameters": {"full_attention": rope, "sliding_attention": rope}})
    with pytest.raises(ConfigError, match=r"has rope_theta = 7\.0, and elsewhere it is 8\.0"):
        from_hugging_face({**keys, "rope_parameters": rope, "rope_theta": 8.0})
    old = {**keys, "rope_scaling": {"type": "default"}, "rope_theta": 8.0}
    assert from_hugging_face(old)["model"]["rope_base"] == 8.0
