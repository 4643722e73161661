"""Megatron's arguments of the optimizer, which has values for every one of them, become those of the one that runs."""

import pytest

from engine.config.training import OptimizerConfig
from models.interop.megatron.config import training_sections

ARGS = {"lr": 1e-3, "adam_beta1": 0.8, "adam_beta2": 0.999, "adam_eps": 1e-6, "sgd_momentum": 0.7, "train_iters": 5}


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
