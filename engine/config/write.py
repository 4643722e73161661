"""Writing a configuration as YAML that `load_config` reads back to an equal one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from triaxis.engine.config.schema.section import Section
from triaxis.engine.config.tree import FORMAT_VERSION, Config
from triaxis.engine.storage.redaction import without_secrets

COMMENT_COLUMN = 36


def to_yaml(config: Config, *, describe: bool = False) -> str:
    """Format a config as YAML text; `load_config` reads a file with this text back to an equal config.

    Args:
        config: config to write.
        describe: True to add each field's meaning as a comment, and to replace secrets from the environment by `[redacted]`.
    """
    text = "\n".join([f"format_version: {FORMAT_VERSION}", *_lines(config, "", describe)]) + "\n"
    return without_secrets(text) if describe else text


def _lines(section: Section, indent: str, describe: bool) -> Iterator[str]:
    for name, about in type(section).model_fields.items():
        value = getattr(section, name)
        if name == "phases":
            yield from _phase_lines(
                section.model_dump(mode="json", include={name})[name], about.description if describe else None
            )
            continue
        if isinstance(value, Section):
            if describe and not indent and name != next(iter(type(section).model_fields)):
                yield ""
            yield f"{indent}{name}:"
            yield from _lines(value, f"{indent}  ", describe)
            continue
        plain = section.model_dump(mode="json", include={name})[name]
        yield from commented_lines(name, plain, about.description if describe else None, indent)


def _phase_lines(phases: Sequence[Mapping[str, Any]], comment: str | None) -> Iterator[str]:
    """Yield the `phases` key and one line of YAML per phase; the comment follows the key."""
    if not phases:
        yield from commented_lines("phases", [], comment, "")
        return
    yield f"{'phases:':<{COMMENT_COLUMN}}  # {comment}" if comment else "phases:"
    for phase in phases:
        text = yaml.dump(
            phase, Dumper=_ShortLists, default_flow_style=True, allow_unicode=True, width=10_000, sort_keys=False
        )
        yield f"  - {text.strip()}"


def commented_lines(name: str, value: object, comment: str | None, indent: str) -> Iterator[str]:
    """Yield a field's YAML lines; `value` is plain JSON data, and the comment follows the first line."""
    text = yaml.dump({name: value}, Dumper=_ShortLists, allow_unicode=True, width=10_000, sort_keys=False)
    first, *rest = text.splitlines()
    first = f"{indent}{first}"
    yield f"{first:<{COMMENT_COLUMN}}  # {comment}" if comment else first
    yield from (f"{indent}{line}" for line in rest)


def in_yaml(text: str) -> str:
    """Format a text as a YAML value, quoted if it would mean something else."""
    return yaml.safe_dump([text], default_flow_style=True, allow_unicode=True, width=10_000).strip()[1:-1]


class _ShortLists(yaml.SafeDumper):
    """A dumper with lists on one line: `[1, 2, 3]`, `[{path: web, weight: 0.7}]`."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        return super().represent_sequence(tag, sequence, flow_style=True)
