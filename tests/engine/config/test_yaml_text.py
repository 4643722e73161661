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
        (LAUGHS, "stand for more than"),
        (CHAIN, "deep in one another"),
        ("[" * 100_000 + "]" * 100_000, "deep in one another"),
        ("a: " + "{a: " * 5000, "deep in one another"),
        ("- " * 5000 + "a", "deep in one another"),
        ("&a [*a]", "have no end"),
        ("2024-13-45", "month must be in 1..12"),
        ("9" * 5000, "a value cannot be read"),
    ],
    ids=["laughs", "chain", "lists", "open mappings", "dashes", "itself", "date", "digits"],
)
def test_what_grows_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(yaml.YAMLError, match=words):
        read_yaml(text)


def test_a_value_on_the_command_line_is_bounded_too() -> None:
    laughs = "{" + LAUGHS.replace("\n", ", ") + "}"
    with pytest.raises(ConfigError, match="aliases stand for more than") as caught:
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
