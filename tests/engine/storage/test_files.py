"""A reader sees the old file or the new one, never a part."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from triaxis.engine.storage.files import write_atomically


def test_a_reader_of_the_old_file_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, [b"old ", memoryview(b"content")])
    with path.open("rb") as reader:
        write_atomically(path, [b"new"])
        assert reader.read() == b"old content"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, [b"old"])

    def parts() -> Iterator[bytes]:
        yield b"ne"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, parts())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
