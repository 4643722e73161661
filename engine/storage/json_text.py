"""Parses JSON texts that others wrote; every fault raises a ValueError."""

import json
import sys
from typing import Any


class RepeatedKeyError(ValueError):
    """A JSON object that gives one key two values."""


def parse_json(text: str | bytes, *, is_unique: bool = False) -> Any:
    """Parse a JSON text.

    Args:
        text: JSON text that holds one value.
        is_unique: refuse a key with two different values in one object; if False, the last value counts.

    Raises:
        RepeatedKeyError: `is_unique`, and a key has two different values.
        ValueError: the text is not JSON, nests too deeply for Python's parser, or has a number with too many digits.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique if is_unique else None)
    except (json.JSONDecodeError, UnicodeDecodeError, RepeatedKeyError):
        raise
    except ValueError:  # the only other one: int() of more digits than Python allows
        raise ValueError(f"a whole number has more than {sys.get_int_max_str_digits():,} digits") from None
    except RecursionError:
        raise ValueError("lists and mappings are nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if (wrong := next((key for key, value in pairs if found[key] != value), None)) is not None:
        raise RepeatedKeyError(f"it gives {wrong!r} two values")
    return found
