"""Kinds of layers: what a config means layer by layer, how it is written, and what a resume may change."""

import re
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.documented import ROOT
from tests.engine.config.bad_configs import LEGAL, config_with
from triaxis.engine.checkpoint.resume_rules import changes
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.attention_pattern import PLAIN, AttentionPattern, attention_pattern
from triaxis.engine.config.write import to_yaml
from triaxis.engine.errors import ConfigError
from triaxis.models.interop.plain_model import BEYOND_PLAIN

GEMMA = [
    "model.layers=[local*5, global]",
    "model.layer_kinds={local: {window: 16, rope_base: 1000}, global: {rope_scaling: {type: linear, factor: 8}}}",
]


def overrides(fields: dict[str, Any], prefix: str = "") -> list[str]:
    """`section.key=value` of each field, the value in YAML."""
    return [f"{prefix}{name}={yaml.safe_dump(value, default_flow_style=True)}" for name, value in fields.items()]


def names(*given: str) -> list[str]:
    return [kind.name for kind in config_with(*given).model.kinds]


def test_a_pattern_is_repeated_and_cut() -> None:
    assert names(*GEMMA) == ["local"] * 5 + ["global"] + ["local"] * 2
    assert names("model.layers=[a, b*2]", "model.layer_kinds={a: {}, b: {}}") == [*"abbabbab"]
    assert names("model.layers=[a*3, b*5]", "model.layer_kinds={a: {}, b: {}}") == [*"aaabbbbb"]
    assert names() == [""] * 8


def test_a_kind_gives_what_differs_and_the_rest_is_the_model_s() -> None:
    model = config_with(*GEMMA, "model.window=24", "model.rope_base=7.0", "model.sinks=true").model
    local, last = model.layer_kind(0), model.layer_kind(5)
    assert (local.window, local.sinks) == (16, True) and local.rotary is not None and last.rotary is not None
    assert (local.rotary.base, local.rotary.scaling) == (1000.0, None)
    assert (last.window, last.rotary.base) == (24, 7.0)
    assert last.rotary.scaling is not None and last.rotary.scaling.factor == 8.0
    free = config_with(
        "model.window=24", "model.layers=[free]", "model.layer_kinds={free: {window: null, position: none}}"
    )
    assert (free.model.layer_kind(3).window, free.model.layer_kind(3).rotary) == (None, None)


def test_longrope_is_long_beyond_the_original_length() -> None:
    scaling = "{{type: longrope, factor: 2, original_max_position_embeddings: {}, short_factor: {}, long_factor: {}}}"
    for original, is_long in ((31, True), (32, False)):
        text = scaling.format(original, [1.0] * 4, [2.0] * 4)
        rotary = config_with(f"model.rope_scaling={text}").model.layer_kind(0).rotary
        assert rotary is not None and rotary.is_long == is_long


def test_equal_kinds_are_one_record_for_tables() -> None:
    model = config_with("model.layers=[a, b]", "model.layer_kinds={a: {window: 4}, b: {sinks: true}}").model
    assert model.layer_kind(0) != model.layer_kind(1) and model.layer_kind(0).rotary == model.layer_kind(1).rotary


def test_the_pattern_of_a_run_is_what_its_layers_need() -> None:
    assert attention_pattern(config_with()) == PLAIN
    assert attention_pattern(config_with("model.window=32")) == PLAIN
    assert attention_pattern(config_with(*GEMMA)) == AttentionPattern(windows=True)
    sinks = config_with(
        "model.layers=[a, b]", "model.layer_kinds={a: {}, b: {sinks: true}}", "model.attention_softcap=5"
    )
    assert attention_pattern(sinks) == AttentionPattern(sinks=True, softcap=True)


def test_the_example_of_the_page_is_legal() -> None:
    """The example has the pattern and windows of Gemma 3."""
    text = re.search(r"```yaml\n(.*?)```", (ROOT / "docs" / "model.md").read_text(), flags=re.DOTALL)
    assert text is not None
    fields: dict[str, Any] = yaml.safe_load(text[1])["model"]
    config = load_config(None, [*LEGAL, *overrides(fields, "model.")])
    assert [kind.window for kind in config.model.kinds] == [512] * 5 + [None] + [512] * 2


kinds_of_layers = st.dictionaries(
    st.sampled_from(["near", "far", "free-1", "_x"]),
    st.fixed_dictionaries(
        {},
        optional={
            "window": st.none() | st.integers(1, 99),
            "rope_base": st.floats(1.0, 1e6),
            "rotary_share": st.sampled_from([0.25, 0.5, 1.0]),
            "sinks": st.booleans(),
            "rope_scaling": st.none() | st.just({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}),
        },
    ),
    min_size=1,
)


@settings(max_examples=40)
@given(kinds_of_layers, st.booleans())
def test_any_kinds_survive_a_file(kinds: dict[str, Any], describe: bool) -> None:
    layers = [f"{name}*2" for name in kinds]
    config = load_config(None, [*LEGAL, *overrides({"layers": layers, "layer_kinds": kinds}, "model.")])
    again = yaml.safe_load(to_yaml(config, describe=describe))
    assert load_config(None, overrides(again)) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("{local: {windw: 4}}", "model.layer_kinds.local.windw.*no such key"),
        ("{local: {window: true}}", "a yes or no where a number belongs"),
        ("{local: {window: 0}}", "greater than 0"),
        ("{local: {position: learned}}", "must be rope or none"),
        ("{local: {position: none, rope_base: 5.0}}", "model.layer_kinds.local.rope_base.*nothing rotates"),
        ("{local: {rope_scaling: {type: llama3, factor: 2}}}", "rope_scaling.low_freq_factor.*must be given"),
        ("{local: {rope_scaling: {type: linear, factor: 2, mscale: 1}}}", "rope_scaling.mscale.*no effect"),
        ("{local: {rotary_share: 0.2}}", "model.layer_kinds.local.rotary_share = 0.2: rotates 1 of the 8"),
        (
            "{local: {rope_scaling: {type: longrope, factor: 2, original_max_position_embeddings: 8, short_factor: [1, 1, 1, 1], "
            "long_factor: [2, 2]}}}",
            "model.layer_kinds.local.rope_scaling.long_factor = 2 numbers: must be 4 numbers",
        ),
    ],
)
def test_a_wrong_kind_is_refused_by_name(change: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, [*LEGAL, "model.layers=[local]", f"model.layer_kinds={change}"])


def test_learned_positions_do_not_rotate_in_a_kind() -> None:
    given = ["model.position=learned", "model.layers=[a]", "model.layer_kinds={a: {position: rope}}"]
    with pytest.raises(ConfigError, match="a token would have two positions"):
        load_config(None, [*LEGAL, *given])


def test_a_resume_may_change_the_model_s_frequencies_where_that_is_meant() -> None:
    saved = config_with("model.rope_base=10000.0").model_dump(mode="json")
    scaled = config_with("model.rope_base=500000.0", "model.rope_scaling={type: linear, factor: 4}")
    assert {change.verdict for change in changes(saved, scaled)} == {"meant"}
    assert {change.verdict for change in changes(saved, config_with(*GEMMA))} == {"never"}
    for name in BEYOND_PLAIN:
        del saved["model"][name]
    assert not changes(saved, config_with()), "a run of before had none of these fields"
