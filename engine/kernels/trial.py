"""Tries a kernel before a run is built."""

from collections.abc import Callable


def failure(run: Callable[[], object]) -> str:
    """Call `run`, and return the first line of its error; "" if it raises none."""
    try:
        run()
    except Exception as error:  # torch, compilers and foreign libraries raise errors of any type
        return first_line(error)
    return ""


def first_line(error: Exception) -> str:
    """Return the first line in an error's text, without a full stop, or its type's name; at most 240 characters."""
    lines = (line.strip().rstrip(".") for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:240]
