"""Names of things on other machines, where the path of a file or folder belongs (no torch here)."""

import re
import shlex
from pathlib import Path

_ADDRESS = re.compile(r"(\w+):/+(.*)")
_HUB_NAME = re.compile(r"(?:datasets/)?[\w.-]+/[\w.-]+")


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
