"""Turn pydantic's validation errors into messages: values with a wrong type, and missing fields."""

import difflib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from pydantic import ValidationError

from triaxis.engine.config.names.foreign_names import our_value
from triaxis.engine.config.schema.dotted import get_field
from triaxis.engine.config.schema.section import Section
from triaxis.engine.config.shipped import config_path
from triaxis.engine.config.tree import Config
from triaxis.engine.config.write import commented_lines
from triaxis.engine.config.yaml_text import read_yaml
from triaxis.engine.errors import shown
from triaxis.engine.storage.state_files import read_text

EXAMPLE = "gpt_tiny"
"""Shipped configuration that supplies the values in a block to paste."""

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "keys with values",
    "model": "keys with values",
    "finite": "a finite number",
}
"""Words for what a field accepts, by the first part of pydantic's error type."""


def type_problems(error: ValidationError, origins: Mapping[str, str], *, lacking: bool = True) -> Iterator[str]:
    """Yield pydantic's findings as our messages, with field, value, rule and legal values.

    Args:
        error: error from validating the whole tree.
        origins: place where a field's value was given, by dotted name, if not in the file.
        lacking: whether to report required fields without a value too.
    """
    missing: dict[str, list[str]] = defaultdict(list)
    for detail in error.errors(include_url=False):
        dotted = ".".join(str(part) for part in detail["loc"])
        above, _, name = dotted.rpartition(".")
        context, about = detail.get("ctx", {}), meaning(detail["loc"])
        given = f"{dotted} = {shown(detail['input'])}"
        given += "".join(f" ({origin})" for name, origin in origins.items() if f"{dotted}.".startswith(f"{name}."))
        match detail["type"]:
            case "missing" if name.isdigit():
                yield f"{above} = {shown(detail['input'])}: lacks its entry {int(name) + 1}{about}."
            case "missing":
                missing[above].append(name)
            case "literal_error":
                choices = context["expected"].replace("'", "")
                names = choices.replace(" or ", ", ").split(", ")
                field = ".".join(part for part in detail["loc"] if isinstance(part, str))
                meant = our_value(field, detail["input"], names)
                # A bool's text could match a word with another meaning.
                typed = "" if isinstance(detail["input"], bool) else str(detail["input"])
                near = [meant] if meant else difflib.get_close_matches(typed, names, n=1, cutoff=0.4)
                hint = f" Did you mean {near[0]}?" if near else ""
                yield f"{given}: must be {choices}.{hint}"
            case "greater_than":
                yield f"{given}: must be greater than {context['gt']}{about}."
            case "greater_than_equal":
                yield f"{given}: must be at least {context['ge']}{about}."
            case "less_than_equal":
                yield f"{given}: must be at most {context['le']:,}{about}."
            case "less_than":
                yield f"{given}: must be less than {context['lt']}{about}."
            case "model_type" | "value_error" if section_at(dotted) is not None and not isinstance(
                detail["input"], dict
            ):
                yield f"{given}: must be a section, that is keys with values.{needed_keys(dotted)}"
            case "extra_forbidden":
                yield f"{given}: there is no such key{about}. Remove it."
            case "value_error":
                yield f"{given}: {context['error']}."
            case "string_too_short":
                yield f"{given}: must not be empty{about}."
            case "too_short" | "too_long":
                number = context.get("min_length", context.get("max_length"))
                yield f"{given}: must have {number} entries, not {context['actual_length']}{about}."
            case kind:
                takes = _TYPES.get(kind.partition("_")[0])
                yield f"{given}: must be {takes}{about}." if takes else f"{given}: {detail['msg'].lower()}{about}."
    if lacking:
        yield from (_lacks(section, names) for section, names in missing.items())


def _lacks(section: str, names: Sequence[str]) -> str:
    """Describe all fields that a section or a list entry lacks, in one message."""
    if len(names) == 1:
        dotted = f"{section}.{names[0]}"
        return f"{dotted} is missing: {section} needs it{meaning(dotted.split('.'))}. Add it to the file."
    example, parts = read_yaml(read_text(config_path(EXAMPLE))), section.split(".")
    lines = [f"{section} lacks {', '.join(names)}, which it needs. Add, with values of your own:"]
    lines += [f"{'  ' * level}{part}:" for level, part in enumerate(parts)]
    for name in names:
        value = get_field(example, f"{section}.{name}")
        about = meaning([*parts, name])[2:-1]
        lines += commented_lines(name, "N" if value is None else value, about, "  " * len(parts))
    return "\n       ".join(lines)


def section_at(dotted: str) -> type[Section] | None:
    """Find the section with this dotted name; None if the name is a field's or does not exist."""
    parts = dotted.split(".")
    way = [section for _, section in Config.along(parts)]
    return way[-1] if len(way) == len(parts) else None


def needed_keys(dotted: str) -> str:
    """Explain how to type an optional section, and how to leave it out; "" for a section that every run has."""
    section = section_at(dotted)
    if section is None or "." not in dotted:
        return ""
    needed = [
        f"{dotted}.{name}={'NAME' if about.annotation is str else 'N'}"
        for name, about in section.model_fields.items()
        if about.is_required()
    ]
    return f" Write {' '.join(needed) or f'{dotted}={{}}'}, or {dotted}=null to leave it out."


def meaning(loc: Sequence[int | str]) -> str:
    """The description of the field at `loc`, in brackets, for a message."""
    descriptions = [about.description for about, _ in Config.along(loc)]
    return f" ({descriptions[-1]})" if descriptions and descriptions[-1] else ""
