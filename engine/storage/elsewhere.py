"""Things on other machines: names of them where a path belongs, and files that stand for them."""

import os
import re
import shlex
from pathlib import Path

_ADDRESS = re.compile(r"(\w+):/+(.*)")
_LOST_SLASH = re.compile(r"^(\w+):/(?!/)")
_LOCAL = " Nothing is read from other machines, or written to them"
_HUB_NAME = re.compile(r"(?:datasets/)?[\w.-]+/[\w.-]+")
_POINTERS = (
    (
        re.compile(rb"version https://git-lfs\.github\.com/spec/v1\n(ext-.*\n)*oid sha256:.*\nsize \d+\s*"),
        "Git LFS",
        "git lfs pull",
    ),
    (re.compile(rb"/annex/objects/[^\n]+\s*"), "git-annex", "git annex get ."),
)
_POINTER_BYTES = 2**12
"""More than a pointer has: that of Git LFS is less than 1,024 bytes long by its specification."""


MOST_BYTES = 4095
"""Bytes of a path in Linux."""
MOST_NAME_BYTES = 255
"""Bytes between two slashes in Linux."""
MOST_NAMES = 512
"""Names in a path: Python makes missing folders by a call inside a call, and ends at 1,000 of them."""


def as_typed(path: str | Path) -> str:
    """Return a path's text; an address has both its slashes, of which pathlib keeps one."""
    return _LOST_SLASH.sub(r"\1://", str(path))


def why_no_path(name: str | Path) -> str:
    """Return why a text can be no path of this machine, and what to do; "" for one that can."""
    return how_to_bring(name).strip() if _ADDRESS.match(str(name)) else why_too_long(name)


def why_too_long(name: str | Path) -> str:
    """Return why a text is too long for a path of any machine, and what to do; "" for one that is not."""
    content = os.fsencode(name)
    names = content.split(b"/")
    if len(content) <= MOST_BYTES and len(names) <= MOST_NAMES and max(map(len, names)) <= MOST_NAME_BYTES:
        return ""
    return (
        f"A path has at most {MOST_BYTES:,} bytes, {MOST_NAMES} names, and {MOST_NAME_BYTES} bytes in each; no file can be there. "
        "Give a shorter one."
    )


def how_to_bring(name: str | Path) -> str:
    """Return the sentence that says how a name on another machine becomes a folder here; "" for a path.

    Args:
        name: an address (`s3://bucket/x`, `hf://owner/name`; pathlib writes one `/`), or `owner/name` of the Hugging Face Hub.
    """
    text = str(name)
    match = _ADDRESS.fullmatch(text)
    if match and not (match[1] == "hf" and _HUB_NAME.fullmatch(match[2])):
        return f"{_LOCAL}: give a path here, and copy between the two with the tool of the store."
    repository = match[2] if match else text
    if not _HUB_NAME.fullmatch(repository) or Path(repository.partition("/")[0]).exists():
        return ""
    kind = " --repo-type dataset" if repository.startswith("datasets/") else ""
    line = f"hf download {shlex.quote(repository.removeprefix('datasets/'))}{kind} --local-dir FOLDER"
    return f"{_LOCAL}. A name on the Hugging Face Hub becomes a folder here by  {line}"


def pointer_of(path: Path) -> tuple[str, str] | None:
    """Return the tool that has put a small text in the place of a file, and the command that brings the file.

    Raises:
        OSError: the path cannot be read.
    """
    with path.open("rb") as handle:
        content = handle.read(_POINTER_BYTES)
    return next(((tool, command) for form, tool, command in _POINTERS if form.fullmatch(content)), None)


def how_to_get(path: Path) -> str:
    """Return the sentence that says how the file comes in the place of its pointer; "" for any other file."""
    found = pointer_of(path)
    return "" if found is None else f" It is a pointer of {found[0]}: `{found[1]}` in its repository brings the file."
