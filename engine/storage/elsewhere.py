"""Recognizes data that is not on this machine, and explains how to get it.

Such data are URLs in place of a path, and pointer files (Git LFS) in place of large files. Nothing is downloaded.
"""

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
"""Number of bytes to read from a file: more than any pointer has, since the Git LFS specification allows less than 1,024."""


MOST_BYTES = 4095
"""Maximum bytes in a path on Linux."""
MOST_NAME_BYTES = 255
"""Maximum bytes between two slashes on Linux."""
MOST_NAMES = 512
"""Maximum names in a path: Python creates missing folders recursively and fails at 1,000 levels."""


def as_typed(path: str | Path) -> str:
    """Return a path as the user typed it. pathlib shortens `s3://` to `s3:/`; the slash is restored."""
    return _LOST_SLASH.sub(r"\1://", str(path))


def why_no_path(name: str | Path) -> str:
    """Explain why a text cannot be a path on this machine; "" if it can."""
    return how_to_bring(name).strip() if _ADDRESS.match(str(name)) else why_too_long(name)


def why_too_long(name: str | Path) -> str:
    """Explain why a text is too long for a path, in bytes or in path components; "" if it is short enough."""
    content = os.fsencode(name)
    names = content.split(b"/")
    if len(content) <= MOST_BYTES and len(names) <= MOST_NAMES and max(map(len, names)) <= MOST_NAME_BYTES:
        return ""
    return (
        f"A path has at most {MOST_BYTES:,} bytes, {MOST_NAMES} names, and {MOST_NAME_BYTES} bytes in each; no file can be there. "
        "Give a shorter one."
    )


def how_to_bring(name: str | Path) -> str:
    """Explain how to copy something from another machine; "" if `name` is a path.

    `owner/name` without `hf://` is a path if `owner` exists on this machine.

    Args:
        name: an address (`s3://bucket/x`, `hf://owner/name`, also in pathlib's form `s3:/bucket/x`), or `owner/name` on the Hugging
            Face Hub.
    """
    text = str(name)
    match = _ADDRESS.fullmatch(text)
    if match and not (match[1] == "hf" and _HUB_NAME.fullmatch(match[2])):
        return f"{_LOCAL}: give a local path, and copy the files with the store's own tool."
    repository = match[2] if match else text
    is_local = not match and Path(repository.partition("/")[0]).exists()
    if is_local or not _HUB_NAME.fullmatch(repository):
        return ""
    kind = " --repo-type dataset" if repository.startswith("datasets/") else ""
    line = f"hf download {shlex.quote(repository.removeprefix('datasets/'))}{kind} --local-dir FOLDER"
    return f"{_LOCAL}. To download this name from the Hugging Face Hub into a folder:  {line}"


def pointer_of(path: Path) -> tuple[str, str] | None:
    """Return (tool, command) for a pointer file, or None for any other file.

    The tool put the pointer in the file's place; the command fetches the file.

    Raises:
        OSError: the path cannot be read.
    """
    with path.open("rb") as handle:
        content = handle.read(_POINTER_BYTES)
    return next(((tool, command) for form, tool, command in _POINTERS if form.fullmatch(content)), None)


def how_to_get(path: Path) -> str:
    """Explain how to replace a Git LFS or git-annex pointer with its file. "" for any other file."""
    found = pointer_of(path)
    return "" if found is None else f" It is a {found[0]} pointer: run `{found[1]}` in its repository to get the file."
