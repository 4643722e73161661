"""Megatron's arguments of the optimizer, which has values for every one of them, and of layers of tokens ahead."""

from typing import Any

import pytest

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.schema.mtp import MTPConfig
from triaxis.engine.config.schema.training import OptimizerConfig
from triaxis.engine.errors import ConfigError
from triaxis.models.interop.megatron.config import differences, megatron_args, model_section, training_sections

ARGS = {"lr": 1e-3, "adam_beta1": 0.8, "adam_beta2": 0.999, "adam_eps": 1e-6, "sgd_momentum": 0.7, "train_iters": 5}
ARGS |= {"global_batch_size": 8, "seq_length": 16}
MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 16,
    "padded_vocab_size": 128,
    "position_embedding_type": "rope",
}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {"name": "adamw", "beta1": 0.8, "beta2": 0.999, "eps": 1e-6, "momentum": 0.9}),
        ({"optimizer": "adam"}, {"name": "adamw", "beta1": 0.8, "beta2": 0.999, "eps": 1e-6, "momentum": 0.9}),
        ({"optimizer": "sgd"}, {"name": "sgd", "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "momentum": 0.7}),
    ],
)
def test_only_the_fields_of_the_optimizer_are_taken(theirs: dict[str, str], ours: dict[str, object]) -> None:
    sections, notes = training_sections(ARGS | theirs)
    optimizer = OptimizerConfig.model_validate(sections["optimizer"])
    assert {name: getattr(optimizer, name) for name in ours} == ours and not notes


def test_an_optimizer_that_is_not_built_is_a_note() -> None:
    sections, notes = training_sections(ARGS | {"optimizer": "dist_muon"})
    assert "name" not in sections["optimizer"] and "optimizer = dist_muon is not built" in notes[0]


def test_layers_of_tokens_ahead_are_arguments_there_and_back() -> None:
    args = MODEL | {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}
    model = ModelConfig.model_validate(model_section(args, 100, "args"))
    assert model.mtp == MTPConfig(num_layers=2, loss_weight=0.3)
    again = megatron_args(model)
    assert {name: again[name] for name in args if "mtp" in name} == {name: args[name] for name in args if "mtp" in name}
    of_default = ModelConfig.model_validate(model_section(MODEL | {"mtp_num_layers": 1}, 100, "args"))
    assert of_default.mtp == MTPConfig(num_layers=1, loss_weight=0.1), "Megatron-LM's default is not ours"
    for none in ({}, {"mtp_num_layers": None, "mtp_loss_scaling_factor": 0.1}, {"mtp_num_layers": 0}):
        plain = ModelConfig.model_validate(model_section(MODEL | none, 100, "args"))
        assert plain.mtp is None and "mtp_num_layers" not in megatron_args(plain)


def test_a_config_with_other_layers_of_tokens_ahead_is_told_from_the_arguments() -> None:
    theirs = model_section(MODEL | {"mtp_num_layers": 2}, 100, "args")
    model = ModelConfig.model_validate(theirs)
    weighted = model.model_copy(update={"mtp": MTPConfig(num_layers=2, loss_weight=0.7)})
    assert not differences(theirs, model) and not differences(theirs, weighted)
    for other in (None, MTPConfig(num_layers=1)):
        (text,) = differences(theirs, model.model_copy(update={"mtp": other}))
        assert text.startswith(f"model.mtp = {0 if other is None else 1} in the config, 2 in Megatron's")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"mtp_num_layers": 17}, r"model\.mtp\.num_layers = 17"),
        ({"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.0}, r"model\.mtp\.loss_weight = 0\.0"),
        ({"mtp_num_layers": [1]}, r"mtp_num_layers = .*must be a number or a word"),
        ({"mtp_num_layers": 1, "mtp_use_repeated_layer": True}, "mtp_use_repeated_layer = True: one layer that"),
        ({"mtp_num_layers": 1, "position_embedding_type": "learned_absolute"}, "mtp_num_layers = 1 with learned pos"),
        ({"mtp_num_layers": 1, "no_rope_freq": 2}, "mtp_num_layers = 1 with no_rope_freq: which entry"),
        (
            {"mtp_num_layers": 1, "window_size": (3, 0), "window_attn_skip_freq": [1, 0, 1, 0]},
            "mtp_num_layers = 1 with window_attn_skip_freq: which entry",
        ),
    ],
)
def test_layers_of_tokens_ahead_that_are_not_built_are_refused(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model_section(MODEL | args, 100, "args")


def test_layers_of_tokens_ahead_behind_layers_that_differ_are_not_exported() -> None:
    fields = model_section(MODEL | {"mtp_num_layers": 1}, 100, "args")
    alike = ModelConfig.model_validate(fields | {"window": 4})
    assert megatron_args(alike)["window_attn_skip_freq"] is None
    differing = {"layers": ["near", "far"], "layer_kinds": {"near": {"window": 4}, "far": {}}}
    with pytest.raises(ConfigError, match=r"model\.mtp with layers that differ: Megatron-LM's lists"):
        megatron_args(ModelConfig.model_validate(fields | differing))


def test_means_over_tokens_ahead_are_a_note() -> None:
    args = ARGS | {"mtp_num_layers": 1}
    (note,) = training_sections(args)[1]
    assert "as with --calculate-per-token-loss" in note
    assert training_sections(args | {"calculate_per_token_loss": True})[1] == []
    assert training_sections(ARGS)[1] == []
