"""Translate configuration names from earlier versions to today's, and leave out removed ones.

config.yaml with format_version 1, manifest.json, a run's events     earlier names are translated when these files are read
a file without format_version, section.key=value                     typed by a user: an earlier name is refused, with today's name
"""

from collections.abc import Mapping
from typing import Any

from triaxis.engine.config.schema.dotted import put_fields
from triaxis.engine.config.values.sources import Source

RENAMED: Mapping[str, str] = {
    "stages": "phases",
    "train.stage": "train.phase",
    "train.eval_interval": "eval.interval",
    "train.eval_steps": "eval.steps",
}
"""Today's dotted names by earlier ones."""

SOURCES = ("data.train", "data.valid")
"""Corpus lists, whose entries used to be (weight, path) pairs."""

REMOVED = ("telemetry.fp8_interval",)
"""Fields that no longer exist, and that no result depended on."""


def translated(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Replace earlier names in a configuration by today's, and leave out removed fields; return a new mapping.

    Args:
        tree: JSON values: nested sections, or values by dotted name as events record them.
    """
    new = {name: dict(value) if isinstance(value, dict) else value for name, value in tree.items()}
    for gone in REMOVED:
        place, key = _place(new, gone)
        place.pop(key, None)
    for old, today in RENAMED.items():
        place, key = _place(new, old)
        if key in place:
            value = place.pop(key)
            if place is new:
                new[today] = value
            else:
                put_fields(new, {today: value})
    if isinstance(new.get("phases"), list):
        new["phases"] = [_with_sources(entry) for entry in new["phases"]]
    return _with_sources(new)


def _with_sources(tree: Any) -> Any:
    """Rewrite the corpora in sections, or in fields by dotted name, into today's form."""
    new = dict(tree) if isinstance(tree, dict) else {}
    for name in SOURCES:
        place, key = _place(new, name)
        if isinstance(place.get(key), list):
            place[key] = [_source(each) for each in place[key]]
    return new if isinstance(tree, dict) else tree


def _place(tree: dict[str, Any], dotted: str) -> tuple[dict[str, Any], str]:
    """Find the (mapping, key) for a dotted name's value, present or not; the mapping is empty if the name's section is missing."""
    section, dot, key = dotted.partition(".")
    if not dot or dotted in tree:
        return tree, dotted
    inner = tree.get(section)
    return (inner, key) if isinstance(inner, dict) else ({}, key)


def _source(entry: Any) -> Any:
    """Convert a (weight, path) pair into today's entry; leave any other entry unchanged."""
    match entry:
        case [float() | int() as weight, str() as path]:
            return Source(path=path, weight=weight).model_dump()
    return entry
