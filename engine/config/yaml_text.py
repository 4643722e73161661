"""Read users' YAML; a text with too many levels or values is refused before any value is built.

YAML 1.1 reads `0100` as 64, `1:30` as 90 and `2024-01-01` as a date; people mean none of them. They are text here, as in YAML 1.2,
and a numeric field reads `0100` as 100.

An alias repeats a whole value, and nested aliases multiply: ten lines can mean a billion values. YAML's composer recurses at every
level, so a text of many opening brackets can end the process. The parser's events show size and depth before any value is built.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

try:
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # PyYAML without libyaml: same behaviour, ten times slower
    from yaml import SafeLoader  # type: ignore[assignment]

MOST_LEVELS = 64
"""Maximum depth of nested lists and mappings; a configuration has four."""

MOST_VALUES = 100_000
"""Maximum number of keys and values; those that an alias repeats count once more."""


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_DATE = "tag:yaml.org,2002:timestamp"
_TEXT = "tag:yaml.org,2002:str"
_BASE_8_OR_60 = re.compile(r"[-+]?0[0-9_]+|.*:.*")


class UniqueKeysLoader(SafeLoader):
    """A loader that refuses a repeated key in a mapping, since the first value would be lost silently."""

    def resolve(self, kind: type[yaml.Node], value: str, implicit: tuple[bool, bool]) -> str:
        tag = str(super().resolve(kind, value, implicit))
        if tag == _DATE or (tag in _NUMBERS and _BASE_8_OR_60.fullmatch(value)):
            return _TEXT
        return tag

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if key.value in lines and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} is given twice in one mapping, in lines {lines[key.value]} and {line}: one "
                    f"value would be lost. Keep one of them",
                    problem_mark=key.start_mark,
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """Parse a YAML text into its value.

    Raises:
        yaml.YAMLError: it is not YAML, a key is given twice in one mapping, it has more levels or values than the limits
            above, or a number with thousands of digits.
    """
    _refuse_what_grows(text)
    try:
        return yaml.load(text, UniqueKeysLoader)
    except ValueError as error:
        raise yaml.constructor.ConstructorError(
            problem=f"a value cannot be read: {error}. Quote it if it is text"
        ) from None


@dataclass(slots=True)
class _Extent:
    """The number of values in a node, and the levels below it."""

    anchor: str | None = None
    values: int = 1
    levels: int = 0


def _refuse_what_grows(text: str) -> None:
    """Read the parser's events, without building a value; raise yaml.YAMLError if levels or values exceed their limits."""
    anchors: dict[str, _Extent] = {}
    around: list[_Extent] = [_Extent()]
    events: Iterator[Any] = yaml.parse(text, SafeLoader)
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            around.append(_Extent(event.anchor))
            _check(len(around) - 1, 0, event.start_mark)
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            node = around.pop()
        elif isinstance(event, yaml.ScalarEvent):
            node = _Extent(event.anchor)
        elif isinstance(event, yaml.AliasEvent):
            if any(outer.anchor == event.anchor for outer in around):
                mark: Any = event.start_mark
                raise yaml.composer.ComposerError(
                    problem=f"the alias *{event.anchor} lies inside of the value that it names, which would have no end",
                    problem_mark=mark,
                )
            # The composer will refuse an unknown alias.
            named = anchors.get(str(event.anchor), _Extent())
            node = _Extent(None, named.values, named.levels)
        else:
            continue
        if node.anchor is not None:
            anchors[node.anchor] = node
        parent = around[-1]
        parent.values += node.values
        parent.levels = max(parent.levels, node.levels + 1)
        _check(len(around) - 1 + node.levels, parent.values, event.start_mark)


def _check(levels: int, values: int, mark: Any) -> None:
    if levels > MOST_LEVELS:
        problem = f"lists and mappings lie more than {MOST_LEVELS} deep in one another, and no field needs that"
    elif values > MOST_VALUES:
        problem = (
            f"it holds more than {MOST_VALUES:,} values, with those that its aliases stand for, and no field needs so many. "
            "Leave some out"
        )
    else:
        return
    raise yaml.composer.ComposerError(problem=problem, problem_mark=mark)
