"""Hugging Face configs: published models get their published parameter counts, and what is not built is refused."""

import json
from typing import Any

import pytest

from engine.config.model import ModelConfig
from engine.errors import ConfigError
from models.interop.huggingface.config import (
    FAMILIES,
    family_of,
    from_hugging_face,
    passed_over,
    passed_over_notes,
    to_hugging_face,
)
from models.specs import model_specs

LLAMA = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "rope_scaling": None,
}

PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    # The files of the named models, without keys of generation; parameters as counted from their published weights.
    "gpt2": (
        {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": "gelu_new",
            "attn_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "resid_pdrop": 0.1,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "summary_type": "cls_index",
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        },
        124_439_808,
    ),
    "llama3_8b": (
        {
            **LLAMA,
            "model_type": "llama",
            "attention_bias": False,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 128256,
        },
        8_030_261_248,
    ),
    "mistral_7b_v0.3": (
        {
            "model_type": "mistral",
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32768,
        },
        7_248_023_552,
    ),
    "qwen2.5_0.5b": (
        {
            **LLAMA,
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        494_032_768,
    ),
    "qwen3_0.6b": (
        {
            **LLAMA,
            "model_type": "qwen3",
            "attention_bias": False,
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        596_049_920,
    ),
}


def without(keys: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in names}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_size(name: str) -> None:
    keys, num_parameters = PUBLISHED[name]
    model = ModelConfig.model_validate(from_hugging_face(json.loads(json.dumps(keys)))["model"])
    assert sum(spec.numel for spec in model_specs(model)) == num_parameters


def test_every_family_has_a_published_model() -> None:
    assert {keys["model_type"] for keys, _ in PUBLISHED.values()} == FAMILIES.keys()


def test_fields_reach_their_places() -> None:
    gpt2 = from_hugging_face(PUBLISHED["gpt2"][0])
    assert gpt2["kernels"] == {"attention": "explicit"}, "dropout on probabilities needs them"
    model = ModelConfig.model_validate(gpt2["model"])
    assert (model.norm, model.position, model.activation, model.bias) == ("layernorm", "learned", "gelu_tanh", "all")
    assert (model.hidden_dropout, model.attention_dropout, model.tie_embeddings) == (0.1, 0.1, True)
    qwen3 = from_hugging_face(PUBLISHED["qwen3_0.6b"][0])
    assert "kernels" not in qwen3
    model = ModelConfig.model_validate(qwen3["model"])
    assert (model.norm, model.position, model.activation, model.bias) == ("rmsnorm", "rope", "swiglu", "none")
    assert (model.qk_norm, model.head_size, model.kv_heads, model.rope_base) == (True, 128, 8, 1e6)
    assert (model.norm_eps, model.seq_length) == (1e-6, 40960)


def test_keys_that_a_file_leaves_out_have_the_defaults_of_their_family() -> None:
    left_out = (
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_theta",
        "tie_word_embeddings",
        "attention_dropout",
        "hidden_act",
    )
    model = ModelConfig.model_validate(from_hugging_face(without(PUBLISHED["llama3_8b"][0], *left_out))["model"])
    assert (model.kv_heads, model.norm_eps, model.rope_base, model.tie_embeddings) == (32, 1e-6, 1e4, False)
    model = ModelConfig.model_validate(from_hugging_face(without(PUBLISHED["qwen3_0.6b"][0], "head_dim"))["model"])
    assert model.head_size == 128
    gpt2 = from_hugging_face(
        without(PUBLISHED["gpt2"][0], "attn_pdrop", "embd_pdrop", "resid_pdrop", "activation_function")
    )
    assert gpt2["model"]["hidden_dropout"] == gpt2["model"]["attention_dropout"] == 0.1


@pytest.mark.parametrize(
    ("name", "kv_heads"), [("llama3_8b", 32), ("mistral_7b_v0.3", 8), ("qwen2.5_0.5b", 32), ("qwen3_0.6b", 32)]
)
def test_key_value_heads_that_a_file_leaves_out_are_those_of_transformers(name: str, kv_heads: int) -> None:
    """Its default is a number in three families; null in the file is as many as query heads in all of them."""
    keys = {**without(PUBLISHED[name][0], "num_key_value_heads"), "num_attention_heads": 32, "head_dim": 64}
    assert ModelConfig.model_validate(from_hugging_face(keys)["model"]).kv_heads == kv_heads
    keys["num_key_value_heads"] = None
    assert ModelConfig.model_validate(from_hugging_face(keys)["model"]).kv_heads == 32


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
    with pytest.raises(ConfigError, match="23 layer_types with sliding_window = 1024"):
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
    with pytest.raises(ConfigError, match=r"model\.rope_scaling = .*dynamic"):
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
    ],
)
def test_kinds_that_no_family_has_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        family_of(ModelConfig.model_validate(LLAMA_LIKE | {"qk_norm": True} | fields), "qwen3")


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


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("llama3_8b", {"attention_bias": True}, "attention_bias = True"),
        ("llama3_8b", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama3_8b", {"rope_interleaved": True}, "rope_interleaved = True: RoPE that turns neighbouring"),
        ("qwen2.5_0.5b", {"use_mrope": True}, "use_mrope = True: RoPE over several positions"),
        ("llama3_8b", {"hidden_act": "relu"}, "hidden_act = 'relu'.*silu"),
        ("llama3_8b", {"hidden_act": "relu"}, "hidden_act = 'relu': must be one of silu"),
        ("llama3_8b", {"model_type": "gemma"}, "model_type = 'gemma': must be one of gpt2, llama"),
        ("llama3_8b", {"hidden_act": ["silu"]}, r"hidden_act = \['silu'\]"),
        ("llama3_8b", {"num_local_experts": 8}, "num_local_experts = 8: not a key that is known here"),
        ("llama3_8b", {"hidden_size": "wide"}, "model.hidden_size = 'wide'"),
        ("llama3_8b", {"model_type": "mixtral"}, "model_type = 'mixtral': must be one of gpt2, llama"),
        ("gpt2", {"activation_function": "relu"}, "activation_function = 'relu'"),
        ("gpt2", {"embd_pdrop": 0.0}, "embd_pdrop = 0.0 and resid_pdrop = 0.1"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scaled by layer is not built"),
        ("gpt2", {"add_cross_attention": True}, "cross-attention"),
    ],
)
def test_what_is_not_built_is_refused_by_name(name: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_hugging_face({**PUBLISHED[name][0], **change})


def test_keys_that_compute_nothing_are_let_through_and_listed() -> None:
    keys = PUBLISHED["llama3_8b"][0]
    more = {
        "_model_name_or_path": "x",
        "_attn_implementation": "sdpa",
        "unk_token_id": 0,
        "temperature": 0.7,
        "top_p": 1,
    }
    assert from_hugging_face({**keys, **more}) == from_hugging_face(keys)
    assert passed_over({**keys, **more}) == sorted(more) and passed_over(keys) == []


def test_a_key_that_nobody_knows_is_let_through_by_name_only() -> None:
    keys = PUBLISHED["llama3_8b"][0]
    with pytest.raises(ConfigError, match=r"strange = 1: not a key that is known here.*--ignore strange"):
        from_hugging_face({**keys, "strange": 1})
    assert from_hugging_face({**keys, "strange": 1}, ignore=["strange"]) == from_hugging_face(keys)
    assert passed_over_notes({**keys, "strange": 1}, ["strange"]) == [
        "keys of config.json that are not known here were ignored (--ignore): strange"
    ]
    for key, value, words in (
        ("absent", None, "no such key"),
        ("mlp_bias", True, "changes the model"),
        ("hidden_size", 1, "changes"),
    ):
        more = {} if value is None else {key: value}
        with pytest.raises(ConfigError, match=f"--ignore {key}: .*{words}"):
            from_hugging_face({**keys, **more}, ignore=[key])


def test_a_number_of_layers_beyond_the_bound_is_refused_before_anything_is_built() -> None:
    with pytest.raises(ConfigError, match=r"model.num_layers = 1000000000: .*less than or equal to 10000"):
        from_hugging_face({**PUBLISHED["llama3_8b"][0], "num_hidden_layers": 10**9})


def test_all_problems_at_once() -> None:
    keys = {**without(PUBLISHED["llama3_8b"][0], "hidden_size", "vocab_size"), "mlp_bias": True, "strange": 1}
    with pytest.raises(ConfigError) as caught:
        from_hugging_face(keys)
    starts = {problem.split(" ")[0] for problem in caught.value.problems}
    assert starts == {"hidden_size", "vocab_size", "mlp_bias", "strange"}


def test_samples_may_have_another_length_with_rope() -> None:
    assert from_hugging_face(PUBLISHED["llama3_8b"][0], seq_length=16384)["model"]["seq_length"] == 16384
    assert (
        from_hugging_face(without(PUBLISHED["llama3_8b"][0], "max_position_embeddings"), seq_length=8)["model"][
            "seq_length"
        ]
        == 8
    )
    with pytest.raises(ConfigError, match="beyond the 1024 learned positions"):
        from_hugging_face(PUBLISHED["gpt2"][0], seq_length=2048)


# Ours -> theirs --------------------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "seq_length": 8,
    "vocab_size": 43,
}
LLAMA_LIKE: dict[str, Any] = {**TINY, "norm": "rmsnorm", "activation": "swiglu", "bias": "none"}


def as_theirs(model: dict[str, Any], family: str | None = None) -> dict[str, Any]:
    checked = ModelConfig.model_validate(model)
    return to_hugging_face(checked, family_of(checked, family), dtype="bfloat16", end_of_document=42)[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_there_and_back_is_the_same_model(name: str) -> None:
    keys, _ = PUBLISHED[name]
    model = ModelConfig.model_validate(from_hugging_face(keys)["model"])
    again = as_theirs(from_hugging_face(keys)["model"], keys["model_type"])
    # What null means is written out.
    explicit = {"num_kv_heads": model.kv_heads, "head_dim": model.head_size, "ffn_hidden_size": model.ffn_size}
    if keys["model_type"] == "gpt2":
        del explicit["num_kv_heads"], explicit["head_dim"]
    assert ModelConfig.model_validate(from_hugging_face(again)["model"]) == model.model_copy(update=explicit)
    for key, value in keys.items():
        if key in FAMILIES[keys["model_type"]].names:
            assert again[key] == value, key
    assert (again["model_type"], again["torch_dtype"]) == (keys["model_type"], "bfloat16")
    assert (again["bos_token_id"], again["eos_token_id"]) == (None, 42)


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ({**TINY, "position": "learned"}, "gpt2"),
        ({**TINY, "position": "learned", "activation": "gelu_tanh", "tie_embeddings": False}, "gpt2"),
        (LLAMA_LIKE, "llama"),
        ({**LLAMA_LIKE, "activation": "geglu_tanh"}, "llama"),
        ({**LLAMA_LIKE, "activation": "geglu"}, "llama"),
        ({**TINY, "position": "learned", "activation": "relu2"}, "gpt2"),
        ({**LLAMA_LIKE, "num_kv_heads": 1, "head_dim": 6}, "llama"),
        ({**LLAMA_LIKE, "hidden_size": 18, "head_dim": 4}, "mistral"),
        ({**LLAMA_LIKE, "bias": "qkv"}, "qwen2"),
        ({**LLAMA_LIKE, "qk_norm": True}, "qwen3"),
    ],
)
def test_a_model_finds_its_family(model: dict[str, Any], family: str) -> None:
    assert family_of(ModelConfig.model_validate(model)) == family


def test_a_family_can_be_asked_for() -> None:
    model = ModelConfig.model_validate(LLAMA_LIKE)
    assert family_of(model, "mistral") == "mistral"
    assert as_theirs(LLAMA_LIKE, "mistral")["sliding_window"] is None, "left out, it would be 4096"
    with pytest.raises(ConfigError, match=r"as qwen3: model\.qk_norm = False, there it is True"):
        family_of(model, "qwen3")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qk_norm": True, "bias": "qkv"}, r"as qwen3: model\.bias = qkv, there it is none"),
        ({"position": "learned"}, r"as llama: model\.position = learned, there it is rope"),
        ({"norm": "layernorm"}, r"as llama: model\.norm = layernorm, there it is rmsnorm"),
        ({"activation": "gelu"}, r"as llama: model\.activation = gelu, there it is swiglu or geglu or geglu_tanh"),
        (
            {
                **TINY,
                "position": "learned",
                "norm": "layernorm",
                "activation": "gelu",
                "bias": "all",
                "num_kv_heads": 2,
            },
            r"as gpt2: model\.num_kv_heads = 2, there each of the 4 heads has its own\.",
        ),
        (
            {**TINY, "position": "learned", "norm": "layernorm", "activation": "gelu", "bias": "all", "head_dim": 6},
            r"as gpt2: model\.head_dim = 6, there heads x head_dim is the hidden size 16\.",
        ),
        ({"window": 8, "bias": "all"}, r"as llama: .*model\.window = 8, which it does not have\."),
        ({"norm_placement": "after"}, r"as llama: model\.norm_placement = after, which it does not have\."),
        ({"logit_softcap": 30}, r"as llama: model\.logit_softcap = 30\.0, which it does not have\."),
        ({"position": "none"}, r"as llama: model\.position = none, there it is rope"),
        (
            {"layers": ["a"], "layer_kinds": {"a": {"sinks": True}}},
            r"model\.layers = \['a'\], .* model\.layer_kinds = \{'a': \{'sinks': True\}\}, which it does not have",
        ),
    ],
)
def test_what_no_family_can_express_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        family_of(ModelConfig.model_validate({**LLAMA_LIKE, **change}))
    assert len(caught.value.problems) == len(FAMILIES), "each family says why not"


def test_dropout_that_a_family_has_no_key_for_is_said() -> None:
    model = ModelConfig.model_validate({**LLAMA_LIKE, "hidden_dropout": 0.1})
    _, notes = to_hugging_face(model, "llama", dtype="float32")
    assert notes == ["model.hidden_dropout = 0.1 has no key in llama: it acts in training only"]
