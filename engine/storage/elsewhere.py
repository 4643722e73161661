"""Things on other machines: names of them where a path belongs, and files that stand for them (no torch here)."""

import re
import shlex
from pathlib import Path

_ADDRESS = re.compile(r"(\w+):/+(.*)")
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


def how_to_bring(name: str | Path) -> str:
    """Return the sentence that says how a name on another machine becomes a folder here; "" for a path.

    Args:
        name: an address (`s3://bucket/x`, `hf://owner/name`; pathlib writes one `/`), or `owner/name` of the Hugging Face Hub.
    """
    text = str(name)
    if (match := _ADDRESS.fullmatch(text)) and match[1] != "hf":
        return " Nothing is read from other machines: copy it to a folder here with the tool of its store, and give that path."
    repository = match[2] if match else text
    if not _HUB_NAME.fullmatch(repository) or Path(repository.partition("/")[0]).exists():
        return ""
    kind = " --repo-type dataset" if repository.startswith("datasets/") else ""
    line = f"hf download {shlex.quote(repository.removeprefix('datasets/'))}{kind} --local-dir FOLDER"
    return f" Nothing is downloaded. A name on the Hugging Face Hub becomes a folder here by  {line}"


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
