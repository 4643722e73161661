"""Parsing of foreign JSON, with one kind of error for all faults (no torch here)."""

import json
import sys
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is no JSON, or Python's parser does not take its depth or the length of a number in it.
    """
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # the only other one: int() of more digits than Python allows
        raise ValueError(f"a whole number has more than {sys.get_int_max_str_digits():,} digits") from None
    except RecursionError:
        raise ValueError("lists and mappings lie too deep in one another") from None
