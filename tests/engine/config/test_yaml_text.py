"""YAML that would end the process or fill the memory is refused before a value is built; all else is read as ever."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from triaxis.engine.config.load import load_config
from triaxis.engine.config.yaml_text import MOST_LEVELS, read_yaml
from triaxis.engine.errors import ConfigError
from triaxis.engine.storage.json_text import parse_json

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 1000))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LAUGHS, "its aliases stand for"),
        ("[" + "a," * 100_000 + "]", "more than 100,000 values"),
        (CHAIN, "deep in one another"),
        ("[" * 100_000 + "]" * 100_000, "deep in one another"),
        ("a: " + "{a: " * 5000, "deep in one another"),
        ("- " * 5000 + "a", "deep in one another"),
        ("&a [*a]", "have no end"),
        ("!!timestamp 2024-13-45", "month must be in 1..12"),
        ("9" * 5000, "a value cannot be read"),
    ],
    ids=["laughs", "many", "chain", "lists", "open mappings", "dashes", "itself", "date", "digits"],
)
def test_what_grows_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(yaml.YAMLError, match=words):
        read_yaml(text)


@pytest.mark.parametrize("text", ["0100", "-007", "1:30", "1:30.5", "2024-01-01", "0_7"])
def test_what_yaml_1_1_reads_as_another_number_or_a_date_is_text(text: str) -> None:
    assert read_yaml(f"{{{text}: [{text}]}}") == {text: [text]}
    assert read_yaml("[0, -5, 1_000, 0x10, 1.5, 0.5]") == [0, -5, 1000, 16, 1.5, 0.5]


def test_a_field_of_numbers_reads_leading_zeros_as_people_do() -> None:
    tree = ["model={num_layers: 04, hidden_size: 64, num_attention_heads: 4, seq_length: 32, vocab_size: 300}"]
    tree += ["data.synthetic=true", "train={global_batch_size: 2, micro_batch_size: 2}", "runtime.name=0100"]
    config = load_config(None, [*tree, "train.steps=0100", "optimizer.lr=00.01"])
    assert (config.model.num_layers, config.train.steps, config.optimizer.lr) == (4, 100, 0.01)
    assert config.runtime.name == "0100"
    with pytest.raises(ConfigError, match=r"train.steps = '1:30'"):
        load_config(None, [*tree, "train.steps=1:30"])


def test_a_value_on_the_command_line_is_bounded_too() -> None:
    laughs = "{" + LAUGHS.replace("\n", ", ") + "}"
    with pytest.raises(ConfigError, match="its aliases stand for") as caught:
        load_config(None, [f"data.train={laughs}"])
    assert len(str(caught.value)) < 3000


def test_aliases_and_depth_within_the_limits_are_read() -> None:
    assert read_yaml("{a: &x {b: 1}, c: {<<: *x, d: [*x, *x]}}") == {
        "a": {"b": 1},
        "c": {"b": 1, "d": [{"b": 1}, {"b": 1}]},
    }
    deepest = "[" * MOST_LEVELS + "]" * MOST_LEVELS
    assert read_yaml(deepest) == yaml.safe_load(deepest)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


@given(plain)
def test_other_yaml_is_read_unchanged(value: object) -> None:
    assert read_yaml(yaml.safe_dump([value, value])) == [value, value]


def test_json_of_many_levels_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="too deep"):
        parse_json("[" * 100_000)
    assert parse_json(b'{"a": [1]}') == {"a": [1]}
