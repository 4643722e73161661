"""Parsing of foreign JSON, with one kind of error for all faults."""

import json
import sys
from typing import Any


class RepeatedKeyError(ValueError):
    """A JSON object that gives one key two values: readers take one of them, and say nothing of the other."""


def parse_json(text: str | bytes, *, is_unique: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        text: of one value.
        is_unique: refuse a key that an object gives two values that differ; else the last one counts.

    Raises:
        ValueError: it is no JSON, or Python's parser does not take its depth or the length of a number in it.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique if is_unique else None)
    except (json.JSONDecodeError, UnicodeDecodeError, RepeatedKeyError):
        raise
    except ValueError:  # the only other one: int() of more digits than Python allows
        raise ValueError(f"a whole number has more than {sys.get_int_max_str_digits():,} digits") from None
    except RecursionError:
        raise ValueError("lists and mappings lie too deep in one another") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if (wrong := next((key for key, value in pairs if found[key] != value), None)) is not None:
        raise RepeatedKeyError(f"it gives {wrong!r} two values")
    return found
