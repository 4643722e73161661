"""Formats numbers for people, and wraps text to a width."""

import math
import textwrap


def significant(value: float) -> str:
    """Format a number with three significant digits below 1 and four from 1 on.

    Numbers from 1,000 on are whole. Numbers below 1e-4 or from 1e5 on have an exponent and two digits, as in 1.2e+06.
    """
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size != 0 and not 1e-4 <= size < 1e5:
        return f"{value:.1e}"
    if size < 1:
        return f"{value:#.3g}"
    return f"{value:#.4g}" if size < 999.95 else f"{value:.0f}"


def compact(value: float) -> str:
    """Format a count in full below 100,000, else with four digits and a unit, as in 124.1k."""
    if abs(value) < 99_999.5:
        return f"{value:,.0f}"
    for unit in ("k", "M", "G"):
        value /= 1000
        if abs(value) < 999.95:
            return f"{value:#.4g}{unit}"
    return f"{value / 1000:#.4g}T"


def gigabyte_decimals(num_bytes: int) -> int:
    """Number of decimals for `num_bytes` in GB. Below 10^9 bytes, three significant digits are shown, else one decimal."""
    return 2 - math.floor(math.log10(num_bytes / 10**9)) if 0 < num_bytes < 10**9 else 1


def gigabytes(num_bytes: int) -> str:
    """Format a size in units of 10^9 bytes, as in 1,234.5 GB or 0.582 GB."""
    return f"{num_bytes / 10**9:,.{gigabyte_decimals(num_bytes)}f} GB"


def in_bytes(num_bytes: int) -> str:
    """Format a size in the largest fitting decimal unit, as in 1.25 GB or 12 B."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes:,} B"


def duration(seconds: float) -> str:
    """Format a time span like a clock, as in 0:09, 1:23:45 or 2d 03:04."""
    whole = round(seconds)
    minutes, seconds_left = divmod(whole, 60)
    hours, minutes_left = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if days:
        return f"{days}d {hours_left:02d}:{minutes_left:02d}"
    if hours:
        return f"{hours}:{minutes_left:02d}:{seconds_left:02d}"
    return f"{minutes}:{seconds_left:02d}"


def wrapped(text: str, width: int) -> list[str]:
    """Wrap text to lines of at most `width` (at least 20) characters. Line breaks stay, and long words stay whole."""
    return [
        part
        for line in text.split("\n")
        for part in textwrap.wrap(line, max(20, width), break_long_words=False, break_on_hyphens=False) or [""]
    ]
