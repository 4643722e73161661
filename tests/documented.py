"""The fenced commands of README and docs with the output that stands below them, and a folder in which they can be run."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
LINKING_PAGES = [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "SECURITY.md", "benchmarks/README.md"))]
LINKING_PAGES += sorted((ROOT / "examples").glob("**/*.md"))


def commands(text: str) -> Iterator[str]:
    """The commands in ```bash blocks: comments left out, continued lines joined."""
    for block in re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line.strip()


def shown_outputs(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of the ```console blocks, a line that begins with `$`, and the lines below it."""
    for block in re.findall(r"^```console\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            yield command, shown


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    without_blocks = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", without_blocks, flags=re.MULTILINE)
    plain = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).replace("`", "").strip().lower() for heading in headings)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading)) for heading in plain}


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of its level."""
    match = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert match is not None, f"no page part is called {heading!r}"
    return match[1]


def make_workplace(folder: Path) -> dict[str, str]:
    """Make `folder` look like the checkout; returns variables with `triaxis` on the path. What commands write is thrown away."""
    for name in ("configs", "docs", "engine", "examples", "launch", "models", "tests", "Makefile", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    triaxis = folder / "bin" / "triaxis"
    triaxis.parent.mkdir()
    triaxis.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m triaxis.launch.cli "$@"\n')
    triaxis.chmod(0o755)
    return os.environ | {
        "PATH": f"{triaxis.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TRIAXIS_PYTHON": sys.executable,
        "CUDA_VISIBLE_DEVICES": "",
    }
