"""The fenced commands of README and docs, and a folder in which they can be run as they stand."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def commands(text: str) -> Iterator[str]:
    """The commands in ```bash blocks: comments left out, continued lines joined."""
    for block in re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line.strip()


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of its level."""
    match = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert match is not None, f"no page part is called {heading!r}"
    return match[1]


def make_workplace(folder: Path) -> dict[str, str]:
    """Make `folder` look like the checkout; returns variables with `triaxis` on the path. What commands write is thrown away."""
    for name in ("configs", "docs", "engine", "launch", "models", "tests", "Makefile", "README.md"):
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
