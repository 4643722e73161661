"""Parse whole numbers as people write them: 8e12, 8T, 20B, 500M, 10k.

    10k  ->  10_000      1.5B  ->  1_500_000_000      8e12  ->  8_000_000_000_000      1.5  ->  refused

A suffix is a power of ten (k 10^3, M 10^6, B 10^9, T 10^12), never of two. The configuration holds the plain integer.
"""

import re
from fractions import Fraction
from math import isfinite
from typing import Annotated

from pydantic import BeforeValidator

SUFFIXES = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
"""Multipliers by suffix."""

LIMIT = 10**18
"""Upper limit for every counter, within 64-bit integers."""

_WRITTEN = re.compile(r"(?P<number>[0-9][0-9_]*(\.[0-9]+)?([eE]\+?[0-9]{1,2})?)(?P<suffix>[kKMBT]?)")


def has_bool(value: object) -> bool:
    """Whether a value is a bool, or a list that contains one."""
    return isinstance(value, bool) or (isinstance(value, list | tuple) and any(map(has_bool, value)))


def no_bool(value: object) -> object:
    """Pass a value through, but refuse a bool, which would count as 1 or 0; for fields outside a `Section`."""
    if has_bool(value):
        raise ValueError("a yes or no where a number belongs")
    return value


def count(value: object) -> object:
    """Parse `value` into an integer. A value that is neither text nor a finite number is returned as it is.

    Args:
        value: YAML value; YAML reads `8e12` and `8T` as text, and `8.0e+12` as a float.

    Raises:
        ValueError: it is a bool, or the number is not whole, too large, or has an unknown suffix.
    """
    no_bool(value)
    if isinstance(value, int) or (isinstance(value, float) and isfinite(value)):
        return _whole(Fraction(value))
    if not isinstance(value, str):
        return value
    written = _WRITTEN.fullmatch(value.strip())
    if written is None:
        raise ValueError(
            f"must be a whole number, such as 10000, 10k, 500M, 20B, 8T or 8e12 (suffixes are {', '.join(SUFFIXES)})"
        )
    return _whole(Fraction(written["number"].replace("_", "")) * SUFFIXES.get(written["suffix"], 1))


def _whole(number: Fraction) -> int:
    if number.denominator != 1:
        raise ValueError("must be a whole number; a part of one cannot be counted")
    if abs(number) >= LIMIT:
        raise ValueError("must be below 10^18, or it does not fit a 64-bit counter")
    return int(number)


Count = Annotated[int, BeforeValidator(count)]
"""A field that counts tokens, samples, steps or microbatches."""
