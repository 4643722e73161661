"""Generates the configuration reference, in which every field is an entry.

    triaxis config explain train.micro_batch_size   ->   one entry
    docs/config.md                                  ->   all entries, as `to_markdown` writes them

Types, defaults and meanings are read from the fields of the config sections' classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from triaxis.engine.config.load import ENVIRONMENT
from triaxis.engine.config.names.foreign_names import unknown_key
from triaxis.engine.config.schema.section import OnResume, Section
from triaxis.engine.config.tree import Config, on_resume
from triaxis.engine.config.values.counts import count
from triaxis.engine.config.values.schedule_file import ScheduleFile
from triaxis.engine.errors import ConfigError

ON_RESUME = {"layout": "free", "meant": "accept", "never": "fixed"}
"""Words for people, by the verdict on a field that a resumed run changes."""

LARGEST_SHOWN = 1_000
"""Largest upper bound that is shown; higher bounds only catch slips."""

PREAMBLE = """# Every field of the configuration

`triaxis config print` prints a whole configuration with the meaning of each field, `triaxis config explain` one entry of this page.
[training.md](training.md#configs-fields-and-variables) describes where values come from.

- **count** is a whole number that may be written as `10k`, `1.5B` or `8e12`. Upper bounds above 1,000 only catch slips; they
  are left out.
- **default** is what a field has if the file does not set it; `required` fields have none.
- **resume** is what happens if a resumed run changes the field: `free` is allowed and logged, `accept` needs the field's name in
  `checkpoint.accept`, `fixed` is refused. Phases may change some fixed fields
  ([training.md](training.md#phases-of-a-run)).
- A name in capitals is an environment variable that sets the field.

This page is the output of `triaxis config explain --markdown`.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One field of the configuration.

    Attributes:
        name: dotted name, such as `train.steps`.
        section: dotted name of the field's section.
        type: type and legal values, such as `integer, 1 to 16, or null`.
        default: default as YAML; `required` if there is none.
        resume: whether a resumed run may change the field, with the condition if there is one. `free`: yes; `accept`: only if
            `checkpoint.accept` names the field; `fixed`: no.
        meaning: meaning and unit.
        variable: environment variable that sets the field; "": none does.
    """

    name: str
    section: str
    type: str
    default: str
    resume: str
    meaning: str
    variable: str

    def __str__(self) -> str:
        variable = f" (environment: {self.variable})" if self.variable else ""
        return f"{self.name}{variable}\n  {self.meaning}\n  {self.type}; default {self.default}; resume {self.resume}\n"


def entries() -> list[Entry]:
    """List every field of the configuration. A section's own fields precede its subsections' fields."""
    return list(_entries(Config, ""))


def chosen(name: str) -> list[Entry]:
    """Return the field `name`, or every field of the section `name`.

    Raises:
        ConfigError: there is no such field or section; the message suggests a similar name.
    """
    found = [one for one in entries() if one.name == name or f"{one.name}.".startswith(f"{name}.")]
    if not found:
        raise ConfigError([unknown_key(name)])
    return found


def to_markdown(found: Sequence[Entry]) -> str:
    """Format fields as the page docs/config.md, with a table for each section."""
    sections = dict.fromkeys(one.section for one in found)
    return "\n".join([PREAMBLE, *(_table(name, [one for one in found if one.section == name]) for name in sections)])


def _table(section: str, found: Sequence[Entry]) -> str:
    rows = [
        f"| `{one.name.rpartition('.')[2]}` | {one.type} | {one.default} | {one.resume} | {_named(one)} |"
        for one in found
    ]
    title = section or "phases"
    return "\n".join(
        [f"## {title}\n", "| field | type | default | resume | meaning |", "|---|---|---|---|---|", *rows, ""]
    )


def _named(one: Entry) -> str:
    meaning = one.meaning.replace("|", "\\|")
    return f"{meaning} (`{one.variable}`)" if one.variable else meaning


def _entries(section: type[Section], prefix: str) -> Iterator[Entry]:
    variables = {field: name for name, field in ENVIRONMENT.items()}
    inner: dict[str, type[Section]] = {}
    for name, field in section.model_fields.items():
        below = section.section_type(name)
        if below is not None:
            inner[name] = below
        if below is None or field.description:  # a section that may be absent is a value, too
            dotted = f"{prefix}{name}"
            kind = _type(field.annotation, field.metadata) if below is None else "section, or null"
            meaning = field.description or ""
            rule = _rule(on_resume(dotted))
            yield Entry(dotted, prefix.rstrip("."), kind, _default(field), rule, meaning, variables.get(dotted, ""))
    for name, below in inner.items():
        yield from _entries(below, f"{prefix}{name}.")


def _rule(rule: OnResume) -> str:
    word = ON_RESUME[rule.verdict]
    return word if rule.is_layout is None else f"{word}; free if no learning rate depends on it"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    return text.replace("''", '""')


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return a type and its legal values in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, *more = args
        return _type(inner, [*metadata, *(bound for one in more for bound in getattr(one, "metadata", [one]))])
    if origin in (Union, UnionType):
        parts = [_type(one, metadata) for one in args if one is not NoneType]
        return ", or ".join([*parts, "null"] if NoneType in args else parts)
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in args)
    if origin in (list, tuple):
        return f"list ({', '.join(dict.fromkeys(_type(one) for one in args if one is not ...))})"
    if origin is dict:
        return f"mapping to {_type(args[1])}"
    if annotation in (int, float):
        name = "count" if any(getattr(one, "func", None) is count for one in metadata) else "integer"
        return f"{name if annotation is int else 'number'}{_bounds(metadata, whole=annotation is int)}"
    names = {bool: "`true`, `false`", str: "text", ScheduleFile: "path"}
    return names[annotation] if annotation in names else f"{{{', '.join(annotation.__annotations__)}}}"


def _bounds(metadata: Sequence[Any], *, whole: bool) -> str:
    """Return a number's bounds in words, as ` from 1 to 16` or ` > 0, < 1`.

    A whole number's upper bound above `LARGEST_SHOWN` is left out.
    """
    limits = {
        word: limit
        for one in metadata
        for word in ("gt", "ge", "lt", "le")
        if (limit := getattr(one, word, None)) is not None
    }
    if whole:
        least = limits.get("ge", limits["gt"] + 1 if "gt" in limits else None)
        largest = limits.get("le", LARGEST_SHOWN + 1)
        to = f" to {largest}" if largest <= LARGEST_SHOWN else ""
        return ("" if least is None else f" from {least:,}") + to
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    return ",".join(f" {signs[word]} {limit:g}" for word, limit in limits.items())
