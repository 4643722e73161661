"""Today's names of what earlier versions have written.

config.yaml of format_version 1, manifest.json, events of a run      translated when they are read
a file without format_version, section.key=value                     typed by a user: refused, with today's name
"""

from collections.abc import Mapping
from typing import Any

from triaxis.engine.config.phases import put_fields
from triaxis.engine.config.sources import Source

RENAMED: Mapping[str, str] = {
    "stages": "phases",
    "train.stage": "train.phase",
    "train.eval_interval": "eval.interval",
    "train.eval_steps": "eval.steps",
}
"""Earlier names, dotted, and today's."""

SOURCES = ("data.train", "data.valid")
"""Lists of corpora, which were pairs of weight and path."""


def translated(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as JSON in today's names; what is of today stays as it is.

    Args:
        tree: sections, or values by dotted name as events record them.
    """
    new = {name: dict(value) if isinstance(value, dict) else value for name, value in tree.items()}
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
    """Return sections, or fields by dotted name, with their corpora as they are written today."""
    new = dict(tree) if isinstance(tree, dict) else {}
    for name in SOURCES:
        place, key = _place(new, name)
        if isinstance(place.get(key), list):
            place[key] = [_source(each) for each in place[key]]
    return new if isinstance(tree, dict) else tree


def _place(tree: dict[str, Any], dotted: str) -> tuple[dict[str, Any], str]:
    """Return the mapping that a name would be in, and its key there."""
    section, dot, key = dotted.partition(".")
    if not dot or dotted in tree:
        return tree, dotted
    inner = tree.get(section)
    return (inner, key) if isinstance(inner, dict) else ({}, key)


def _source(entry: Any) -> Any:
    """Return a pair of weight and path as the entry that it is today."""
    match entry:
        case [float() | int() as weight, str() as path]:
            return Source(path=path, weight=weight).model_dump()
    return entry
