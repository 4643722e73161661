"""JSON that others wrote, with one kind of error for all that can be wrong with it (no torch here)."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is no JSON, or lists and mappings lie so deep in one another that Python's parser gives up.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists and mappings lie too deep in one another") from None
