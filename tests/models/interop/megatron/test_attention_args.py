"""Megatron's arguments of attention as our fields and back: scalings, windows, kinds of layers, sinks, norms stored less one."""

from typing import Any

import pytest

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.errors import ConfigError
from triaxis.models.interop.megatron.config import differences, megatron_args, model_section

ARGS: dict[str, Any] = {
    "num_layers": 6,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "padded_vocab_size": 128,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
}


def model_of(**args: Any) -> ModelConfig:
    return ModelConfig.model_validate(model_section({**ARGS, **args}, 100, "args"))


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        ({"rotary_percent": 0.5}, {"rotary_share": 0.5}),
        ({"rotary_percent": 1.0, "window_size": (-1, 0), "no_rope_freq": 0}, {}),
        ({"softmax_scale": 0.25}, {"attention_scale": 0.25}),
        ({"softmax_type": "learnable"}, {"sinks": True}),
        ({"window_size": [7, 0]}, {"window": 8}),
        ({"apply_layernorm_1p": True, "qk_layernorm": True}, {"norm": "rmsnorm_1p", "qk_norm": True}),
        ({"layernorm_zero_centered_gamma": True}, {"norm": "rmsnorm_1p"}),
    ],
)
def test_arguments_are_fields(args: dict[str, Any], fields: dict[str, Any]) -> None:
    assert model_of(**args) == model_of().model_copy(update=fields)


def test_scalings_are_those_of_the_formulas() -> None:
    linear = model_of(rotary_seq_len_interpolation_factor=4).rope_scaling
    assert linear is not None and (linear.type, linear.factor) == ("linear", 4.0)
    llama3 = model_of(use_rope_scaling=True).rope_scaling
    assert llama3 is not None and (llama3.type, llama3.factor, llama3.original_max_position_embeddings) == (
        "llama3",
        8.0,
        8192,
    )
    assert model_of(position_embedding_type="learned_absolute", use_rope_scaling=True).rope_scaling is None


@pytest.mark.parametrize(
    ("args", "windows", "still"),
    [
        ({"window_size": (3, 0), "window_attn_skip_freq": 3}, [4, 4, None, 4, 4, None], [0] * 6),
        ({"window_size": (3, 0), "window_attn_skip_freq": [1, 0, 0, 1, 1, 0]}, [4, None, None, 4, 4, None], [0] * 6),
        ({"no_rope_freq": 3}, [None] * 6, [0, 0, 1] * 2),
        ({"window_size": (3, 0), "no_rope_freq": [0, 1, 0, 0, 0, 1]}, [4] * 6, [0, 1, 0, 0, 0, 1]),
    ],
)
def test_patterns_are_kinds_of_layers(args: dict[str, Any], windows: list[int | None], still: list[int]) -> None:
    model = model_of(**args)
    assert [kind.window for kind in model.kinds] == windows
    assert [int(kind.rotary is None) for kind in model.kinds] == still
    again = ModelConfig.model_validate(model_section(megatron_args(model), 100, "args"))
    assert again.kinds == model.kinds and not differences(model.model_dump(mode="json"), again)


@pytest.mark.parametrize(
    "fields",
    [
        {"rotary_share": 0.5, "attention_scale": 0.1, "sinks": True, "window": 5},
        {"norm": "rmsnorm_1p", "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"position": "none", "window": 3},
        {"layers": ["a", "b*2"], "layer_kinds": {"a": {"window": 3, "rope_base": 50.0}, "b": {"position": "none"}}},
    ],
)
def test_there_and_back_is_the_same_model(fields: dict[str, Any]) -> None:
    model = ModelConfig.model_validate(model_of().model_dump() | fields)
    again = ModelConfig.model_validate(model_section(megatron_args(model), 100, "args"))
    plain = [(kind.window, kind.rotary, kind.sinks) for kind in model.kinds]
    assert [(kind.window, kind.rotary, kind.sinks) for kind in again.kinds] == plain
    assert (again.norm, again.attention_scale) == (model.norm, model.attention_scale)


def test_a_config_with_other_windows_is_told_from_the_arguments() -> None:
    theirs = model_section({**ARGS, "window_size": (3, 0), "window_attn_skip_freq": 2}, 100, "args")
    fields = {"layers": ["n", "f"], "layer_kinds": {"n": {"window": 4}, "f": {}}}
    same = ModelConfig.model_validate(model_of().model_dump() | fields)
    assert not differences(theirs, same)
    other = ModelConfig.model_validate(model_of().model_dump() | {**fields, "layers": ["f", "n"]})
    assert [text.split(":")[0] for text in differences(theirs, other)] == ["model.layers"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"softmax_type": "off-by-one"}, "softmax_type = 'off-by-one': only vanilla and learnable"),
        ({"window_size": (3, 3)}, r"window_size = \(3, 3\): must be \(keys before the query, 0\)"),
        ({"window_size": "(3, 0)"}, "window_size = .*must be a number or a list of numbers"),
        ({"window_size": (3, 0), "window_attn_skip_freq": [1, 0]}, "window_attn_skip_freq = .*an entry for each of 6"),
        ({"no_rope_freq": 4}, "no_rope_freq = 4: must have an entry for each of 6 layers, or be a divisor"),
        ({"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2}, "two scalings of one RoPE"),
        (
            {"apply_layernorm_1p": True, "normalization": "LayerNorm"},
            "apply_layernorm_1p with normalization = 'LayerNorm'",
        ),
        ({"rotary_percent": [0.5]}, "rotary_percent = .*must be a number or a word"),
        ({"position_embedding_type": "yarn"}, "position_embedding_type = 'yarn': must be one of"),
    ],
)
def test_arguments_that_are_not_built_are_refused_by_name(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model_of(**args)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
          "original_max_position_embeddings": 4096}}, "Megatron-LM has low_freq_factor = 1, .*no argument for others"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 8}}, "type = yarn: an exchange"),
        ({"layers": ["a", "b"], "layer_kinds": {"a": {"window": 3}, "b": {"window": 4}}}, "windows of 3, 4 keys"),
        ({"layers": ["a", "b"], "layer_kinds": {"a": {"rope_base": 3.0}, "b": {}}}, "rotate in different ways"),
        ({"layers": ["a", "b"], "layer_kinds": {"a": {"sinks": True}, "b": {}}}, "sinks on some layers"),
        ({"attention_softcap": 5.0}, r"model\.attention_softcap = 5\.0: an exchange"),
        ({"norm_placement": "both"}, r"model\.norm_placement = both: an exchange"),
    ],
)  # fmt: skip
def test_a_model_that_megatron_does_not_have_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        megatron_args(ModelConfig.model_validate(model_of().model_dump() | fields))
