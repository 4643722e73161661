"""Parsing of foreign JSON, with one kind of error for all faults (no torch here)."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is no JSON, or is nested too deep for Python's parser.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists and mappings lie too deep in one another") from None
