"""A reader sees the old file or the new one, never a part."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from triaxis.engine.storage.files import write_atomically
from triaxis.engine.storage.state_files import read_regular


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


def test_a_read_takes_the_memory_of_the_file_and_not_of_its_bound(tmp_path: Path) -> None:
    """A limit of address space (`ulimit -v`) below the bound ended the read of every config."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3_000_000)
    tracemalloc.start()
    try:
        assert read_regular(path, 2**30) == path.read_bytes()
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()
    assert len(read_regular(path, 3_000_000)) == 3_000_000
    with pytest.raises(OSError, match="more than 2,999,999 bytes"):
        read_regular(path, 2_999_999)
