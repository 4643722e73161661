"""Hugging Face configs: published models get their published parameter counts, and what is not built is refused."""

import json
from typing import Any

import pytest

from tests.models.interop.huggingface.published import PUBLISHED, model_of, without
from tests.models.interop.huggingface.published_experts import PUBLISHED_EXPERTS
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.errors import ConfigError
from triaxis.models.interop.huggingface.config import from_hugging_face, passed_over, passed_over_notes, text_keys
from triaxis.models.interop.huggingface.families import FAMILIES
from triaxis.models.specs import model_specs


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_size(name: str) -> None:
    keys, num_parameters = PUBLISHED[name]
    model = ModelConfig.model_validate(from_hugging_face(json.loads(json.dumps(keys)))["model"])
    assert sum(spec.numel for spec in model_specs(model)) == num_parameters


def test_every_family_has_a_published_model() -> None:
    with_experts = {keys["model_type"] for keys, _, _ in PUBLISHED_EXPERTS.values()}
    assert {text_keys(keys)["model_type"] for keys, _ in PUBLISHED.values()} | with_experts == FAMILIES.keys()


def test_a_gemma_has_its_norms_multipliers_caps_and_windows() -> None:
    model = model_of("gemma2_9b")
    assert (model.norm, model.norm_placement, model.activation) == ("rmsnorm_1p", "both", "geglu_tanh")
    assert (model.embedding_multiplier, model.attention_softcap, model.logit_softcap) == (3584**0.5, 50.0, 30.0)
    assert model.attention_scale is None, "256 is its head_dim"
    assert model_of("gemma2_9b", query_pre_attn_scalar=144).attention_scale == 144**-0.5
    assert [kind.window for kind in model.kinds] == [4096, None] * 21
    model = model_of("gemma3_1b")
    assert (model.qk_norm, model.rope_base, len(model.kinds)) == (True, 1e6, 26)
    assert model.layer_kinds == {"sliding_attention": {"window": 512, "rope_base": 10000}, "full_attention": {}}
    assert model.layers is not None and model.layers[:2] == ["sliding_attention*5", "full_attention"]
    model = model_of("gemma3_4b")
    assert [kind.window for kind in model.kinds[:6]] == [1024] * 5 + [None]
    assert [kind.rotary is not None and kind.rotary.scaling is not None for kind in model.kinds[4:6]] == [False, True]


def test_the_language_model_of_several_parts_is_read_alone() -> None:
    keys = PUBLISHED["gemma3_4b"][0]
    assert passed_over_notes(keys) == [
        "of a model of several parts the language model (text_config) was taken, without vision_config"
    ]
    assert from_hugging_face(keys) == from_hugging_face(text_keys(keys))
    with pytest.raises(ConfigError, match="model_type = None: must be one of"):
        from_hugging_face({**keys, "text_config": without(keys["text_config"], "model_type")})


def test_an_olmo_has_norms_after_and_over_all_heads() -> None:
    model = model_of("olmo2_7b")
    assert (model.norm, model.norm_placement, model.qk_norm) == ("rmsnorm", "after", "all_heads")
    model = model_of("olmo3_7b")
    assert [kind.window for kind in model.kinds[:4]] == [4096] * 3 + [None]
    bases = {kind.rotary.base for kind in model.kinds if kind.rotary is not None}
    scalings = [kind.rotary is not None and kind.rotary.scaling is not None for kind in model.kinds[:4]]
    assert (bases, scalings) == ({5e5}, [False] * 3 + [True])


def test_multipliers_of_a_granite_reach_their_places() -> None:
    model = model_of("granite3_2b")
    assert (model.embedding_multiplier, model.residual_multiplier, model.logit_divisor) == (12.0, 0.22, 8.0)
    assert (model.attention_scale, model.head_size) == (0.015625, 64)
    with pytest.raises(ConfigError, match=r"attention_multiplier = 0: must be a number above 0"):
        model_of("granite3_2b", attention_multiplier=0)


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
        ("llama3_8b", {"model_type": "qwen2_moe"}, "model_type = 'qwen2_moe': must be one of gpt2, llama"),
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


@pytest.mark.parametrize(
    ("name", "agrees", "differs"),
    [
        ("phi3_mini", {"lm_head_bias": False, "interpolate_factor": 1, "full_attn_mod": 1}, {"lm_head_bias": True}),
        ("llama3_8b", {"max_sequence_length": 8192}, {"max_sequence_length": 2048}),
        ("llama3_8b", {"mlp_bias": False, "n_embd": 4096, "num_kv_heads": 8}, {"num_kv_heads": 32}),
        ("llama3_8b", {"internal_version": "7b-v2", "transformers.js_config": {"a": 1}}, {"full_attn_mod": 2}),
        ("qwen2.5_0.5b", {"attention_bias": True, "qkv_bias": True}, {"o_proj_bias": True}),
        ("qwen2.5_0.5b", {"attention_bias": False}, {"use_bias": False}),
        ("gpt2", {"attention_bias": True, "ffn_dropout": 0.0}, {"ffn_dropout": 0.1}),
        ("gpt2", {"n_special": 0, "predict_special_tokens": True}, {"n_special": 1}),
        ("gpt2", {"cross_attention_hidden_size": None, "unsloth_fixed": True}, {"scale_attn_weights": None}),
        ("llama3_8b", {"cross_attention_hidden_size": None}, {"cross_attention_hidden_size": 64}),
        ("smollm3_3b", {"logits_scale": 1.0}, {"attn_period": 1}),
    ],
)
def test_an_unknown_key_that_repeats_a_fact_agrees_with_it(
    name: str, agrees: dict[str, Any], differs: dict[str, Any]
) -> None:
    keys = PUBLISHED[name][0]
    assert from_hugging_face({**keys, **agrees}) == from_hugging_face(keys)
    with pytest.raises(ConfigError, match=f"{next(iter(differs))} = "):
        from_hugging_face({**keys, **differs})


def test_a_length_is_that_of_stretched_positions_too() -> None:
    """Vicuna 16k has the length before its linear scaling, and after it."""
    keys = {
        **PUBLISHED["llama3_8b"][0],
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    }
    assert from_hugging_face({**keys, "max_sequence_length": 16384}) == from_hugging_face(keys)
    with pytest.raises(ConfigError, match="max_sequence_length = 8192"):
        from_hugging_face({**keys, "max_sequence_length": 8192})


def test_a_message_repeats_no_key_or_value_without_bound() -> None:
    keys = PUBLISHED["llama3_8b"][0]
    for more in (
        {"x" * 10**6: 1},
        {"strange": "x" * 10**6},
        {f"strange{number}": 1 for number in range(10**5)},
        {"hidden_act": ["silu"] * 10**6},
        {"rope_scaling": {"rope_type": "x" * 10**6, "factor": 2.0}},
    ):
        with pytest.raises(ConfigError) as caught:
            from_hugging_face({**keys, **more})
        assert len(str(caught.value)) < 30_000
    [line] = passed_over_notes({**keys, "_a\nb": 1, "_" + "x" * 10**6: 1})
    assert "\n" not in line and len(line) < 1000


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
