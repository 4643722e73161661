"""Groups of parameters by name: the first match, and patterns that are mistakes."""

import pytest

from tests.engine.config.bad_configs import config_with
from triaxis.engine.config.quantities.update_settings import UpdateRule, update_rule
from triaxis.engine.config.rules.check import problems
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.tree import Config
from triaxis.models.parameter_groups import grouped_parameters, groups_have_parameters


def with_groups(*groups: dict[str, object]) -> Config:
    return with_value(config_with(), "optimizer.groups", list(groups))


def test_the_first_match_wins_and_the_rest_is_the_optimizers_own() -> None:
    config = with_groups(
        {"match": "embedding.*", "weight_decay": 0.0},
        {"match": "layers.[0-1].*", "lr_factor": 0.5},
        {"match": "layers.*.norm.weight", "weight_decay": 0.2, "lr_factor": 3.0},
    )
    rules = {one.spec.name: one.rule for one in grouped_parameters(config)}
    assert rules["embedding.word.weight"] == UpdateRule(1.0, 0.0)
    assert rules["layers.0.attention.q.weight"] == UpdateRule(0.5, 0.1)
    assert rules["layers.1.mlp.norm.weight"] == UpdateRule(0.5, 0.0), "an earlier group has it, and norms do not decay"
    assert rules["layers.2.mlp.norm.weight"] == UpdateRule(3.0, 0.2)
    assert rules["layers.2.mlp.norm.bias"] == UpdateRule(1.0, 0.0)
    assert rules["layers.7.mlp.up.weight"] == UpdateRule(1.0, 0.1)
    assert update_rule("layers.10.mlp.up.weight", config.optimizer, decays=True) == UpdateRule(1.0, 0.1), "one digit"


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            [{"match": "embeding.*", "lr_factor": 2.0}],
            ["groups.0.match = embeding.*", "matches no parameter", "config params"],
        ),
        (
            [{"match": "layers.*", "lr_factor": 2.0}, {"match": "layers.2.*", "lr_factor": 3.0}],
            ["groups.1.match = layers.2.*", "earlier groups", "layers.2.attention.norm.weight of layers.*", "narrower"],
        ),
        ([{"match": "embedding.*"}], ["groups.0.match = embedding.*", "none of weight_decay, lr_factor and freeze"]),
        ([{"match": "*", "freeze": True}], ["optimizer.groups = *", "freezes all parameters", "freeze: false"]),
    ],
    ids=["no parameter", "no parameter is left", "no field", "everything is frozen"],
)
def test_a_group_without_effect_is_refused(groups: list[dict[str, object]], words: list[str]) -> None:
    [message] = problems(with_groups(*groups), more_rules=[groups_have_parameters])
    assert not [word for word in words if word not in message], message


def test_two_groups_of_one_pattern_are_refused() -> None:
    twice = {"match": "embedding.*", "lr_factor": 2.0}
    said = problems(with_groups(twice, twice))
    assert len(said) == 1 and "groups.1.match" in said[0] and "the pattern of two groups" in said[0]


def test_what_is_not_trained_is_in_no_group() -> None:
    config = config_with(
        "model.moe={num_experts: 4, top_k: 2, ffn_hidden_size: 32, choice_bias: true}",
        "model.layers=[moe]",
        "model.bias=none",
        "model.norm=rmsnorm",
        'optimizer.groups=[{match: "*.router.*", lr_factor: 0.5}, {match: "*.bias", lr_factor: 2.0}]',
    )
    found = {one.spec.name: one for one in grouped_parameters(config)}
    assert found["layers.0.mlp.router.bias"].rule is None and found["layers.0.mlp.router.weight"].number == 0
    [message] = problems(config, more_rules=[groups_have_parameters])
    assert "*.bias: matches no parameter that is trained" in message


def test_frozen_parameters_have_no_rule_and_an_earlier_group_may_keep_some_trained() -> None:
    config = config_with(
        "model.moe={num_experts: 4, top_k: 2, ffn_hidden_size: 32, choice_bias: true}",
        "model.layers=[moe]",
        "model.bias=none",
        "model.norm=rmsnorm",
        'optimizer.groups=[{match: "*norm.weight", freeze: false}, {match: "layers.0.*", freeze: true}]',
    )
    assert not problems(config, more_rules=[groups_have_parameters])
    found = {one.spec.name: one for one in grouped_parameters(config)}
    for name in ("layers.0.attention.q.weight", "layers.0.mlp.router.bias"):
        assert found[name].is_frozen and found[name].rule is None and found[name].number == 1
    assert found["layers.0.attention.norm.weight"].rule == UpdateRule(1.0, 0.0)
    assert not found["layers.1.mlp.router.bias"].is_frozen


@pytest.mark.parametrize(
    "group",
    [
        {"lr_factor": 2.0},
        {"match": "", "lr_factor": 2.0},
        {"match": "*", "lr_factor": 0},
        {"match": "*", "lr": 1.0},
        {"match": "*", "freeze": "some"},
    ],
)
def test_other_fields_are_refused(group: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="groups"):
        config_with(f"optimizer.groups=[{group}]".replace("'", '"'))
