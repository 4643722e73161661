"""Today's names of what earlier versions have written (no torch here).

config.yaml of format_version 1, manifest.json, events of a run      translated when they are read
a file without format_version, section.key=value                     typed by a user: refused, with today's name
"""

from collections.abc import Mapping
from typing import Any

RENAMED: Mapping[str, str] = {
    "stages": "phases",
    "train.stage": "train.phase",
    "train.eval_interval": "eval.interval",
    "train.eval_steps": "eval.steps",
}
"""Earlier names, dotted, and today's."""


def translated(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as JSON in today's names; what is of today stays as it is.

    Args:
        tree: sections, or values by dotted name as events record them.
    """
    new = {name: dict(value) if isinstance(value, dict) else value for name, value in tree.items()}
    for old, today in RENAMED.items():
        place, key = _place_of(new, old)
        if key in place:
            value = place.pop(key)
            place, key = _place_of(new, today)
            place[key] = value
    return new


def _place_of(tree: dict[str, Any], dotted: str) -> tuple[dict[str, Any], str]:
    """Return the mapping that a name is in, and its key there: a section is made where the tree has sections."""
    section, dot, key = dotted.partition(".")
    if not dot or any("." in name for name in tree):
        return tree, dotted
    inner = tree.setdefault(section, {})
    return (inner, key) if isinstance(inner, dict) else ({}, key)
