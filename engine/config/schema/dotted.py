"""Read and change fields by their dotted names, such as `train.steps`: in sections, and in nested mappings."""

from collections.abc import Mapping
from typing import Any, TypeVar

from triaxis.engine.config.schema.section import Section

_Section = TypeVar("_Section", bound=Section)


def value_of(section: Section | None, dotted: str) -> Any:
    """Return the value of a field, such as `train.steps`; None if its section is not given."""
    value: Any = section
    for name in dotted.split("."):
        value = None if value is None else getattr(value, name)
    return value


def with_value(section: _Section, dotted: str, value: object) -> _Section:
    """Copy the config, or a section, with one field changed, such as `train.steps` or `telemetry.profile.start`."""
    name, _, rest = dotted.partition(".")
    changed = with_value(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: changed})


def put_fields(tree: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Set fields by their dotted names in a nested mapping."""
    for dotted, value in fields.items():
        *sections, name = dotted.split(".")
        at = tree
        for section in sections:
            at[section] = at.get(section) or {}
            at = at[section]
        at[name] = value


def get_field(tree: Mapping[str, Any], dotted: str) -> Any:
    """Look up a dotted name in a nested mapping; None if it is absent."""
    value: Any = tree
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def with_fields(section: _Section, fields: Mapping[str, Any]) -> _Section:
    """Copy the config, or a section, with fields set by their dotted names."""
    tree = section.model_dump(mode="json")
    put_fields(tree, fields)
    return type(section).model_validate(tree)
