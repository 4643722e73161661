"""Paths and names in a configuration: what the shell does not expand in `checkpoint.dir=~/x` is expanded here."""

import os
import re
from typing import Annotated

from pydantic import AfterValidator, Field

from triaxis.engine.storage.elsewhere import how_to_bring, why_too_long

_VARIABLE = re.compile(r"\$\{?\w+\}?")


LONGEST_NAME = 128
"""Maximum characters in a name; a folder's name may have 255 bytes."""


def local_path(text: str) -> str:
    """Expand `~` and `$NAME` in a path.

    Raises:
        ValueError: an address on another machine, a variable that is not set, a NUL, or a text that is too long.
    """
    if "://" in text:
        raise ValueError(how_to_bring(text).strip())
    # pathlib's `expanduser` would drop a leading `./`, and raise for a user that does not exist.
    expanded = os.path.expandvars(os.path.expanduser(text))  # noqa: PTH111
    if expanded.startswith("~"):
        raise ValueError("this machine has no such user; write the path")
    if unset := _VARIABLE.search(expanded):
        raise ValueError(
            f"{unset[0]} is not set, so a folder of that very name would be meant; set it, or write the path"
        )
    if "\0" in expanded:
        raise ValueError("a NUL is in it, which no path can have")
    if why := why_too_long(expanded):
        raise ValueError(why)
    return expanded


def _local_tokenizer(text: str) -> str:
    """Expand a tokenizer's path, but not a pattern after it (`ranks.tiktoken:PATTERN`), which may hold any character."""
    path, colon, pattern = text.partition(":")
    return local_path(text) if pattern.startswith("//") else f"{local_path(path)}{colon}{pattern}"


def one_line(text: str) -> str:
    """Check that a name fits into one line of a log or table, and return it.

    Raises:
        ValueError: it is longer than `LONGEST_NAME`, or has a newline or another character that is not printed.
    """
    if len(text) > LONGEST_NAME or not text.isprintable():
        raise ValueError(f"must be one line of at most {LONGEST_NAME} printable characters, or no log could show it")
    return text


LocalPath = Annotated[str, AfterValidator(local_path)]
TokenizerName = Annotated[str, AfterValidator(_local_tokenizer)]
Name = Annotated[str, Field(min_length=1), AfterValidator(one_line)]
