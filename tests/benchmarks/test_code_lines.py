"""What counts as a code line, and the rows of the table."""

from pathlib import Path

import pytest

from benchmarks.code_lines import count, imports, main

SOURCE = '''"""A module."""

import os
from pathlib import (
    Path,
)


class Place:
    """A place."""

    path: Path = Path(
        "somewhere",
    )
    """Its path."""

    def exists(self) -> bool:
        """Return whether it is there."""
        # A comment.
        return os.path.exists(self.path)
'''


def test_docstrings_imports_and_comments_are_no_code_lines() -> None:
    assert count(SOURCE) == 4  # class, attribute, function, return


def test_a_row_for_each_folder_and_the_sum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("top.py", "room/a.py", "room/deep/b.py", "other/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(SOURCE)
    main([str(tmp_path)])
    rows = [line.replace(str(tmp_path), "here").split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["4", "1", "files", "here"],
        ["4", "1", "files", "here/other"],
        ["8", "2", "files", "here/room"],
        ["16", "4", "files", "in", "all"],
    ]


def test_every_way_to_import_is_followed() -> None:
    source = """
from typing import TYPE_CHECKING
import triaxis.a
if TYPE_CHECKING:
    import triaxis.types
def later():
    from triaxis.b import c
SINKS = {"wandb": "triaxis.d:Sink"}
"""
    found = {name for name in imports(source) if name.startswith("triaxis.")}
    assert found == {"triaxis.a", "triaxis.b", "triaxis.b.c", "triaxis.d"}
