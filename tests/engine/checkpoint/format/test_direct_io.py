"""Files past the page cache hold the same bytes, whatever their lengths are and whatever the file system allows."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.checkpoint.format.direct_io import BLOCK_BYTES, one_ahead, read_range, set_direct, write_direct
from triaxis.engine.device.pinned_memory import aligned_buffer


def contents_of(lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator) for length in lengths]


def joined(contents: list[torch.Tensor]) -> bytes:
    return b"".join(content.numpy().tobytes() for content in contents)


LENGTHS = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES, 5 * BLOCK_BYTES + 7]


@settings(deadline=None)
@given(lengths=st.lists(st.sampled_from(LENGTHS), max_size=6), blocks=st.integers(1, 3), data=st.data())
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], blocks: int, data: st.DataObject
) -> None:
    contents = contents_of(lengths)
    path = tmp_path_factory.mktemp("direct") / "file"
    assert write_direct(path, contents, blocks * BLOCK_BYTES) == sum(lengths)
    assert path.read_bytes() == joined(contents)
    offset = data.draw(st.integers(0, sum(lengths)), "offset")
    num_bytes = data.draw(st.integers(0, sum(lengths) + BLOCK_BYTES), "num_bytes")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        set_direct(descriptor, data.draw(st.booleans(), "direct"))
        got = read_range(descriptor, aligned_buffer(num_bytes + 2 * BLOCK_BYTES), offset, num_bytes)
    finally:
        os.close(descriptor)
    assert got.numpy().tobytes() == joined(contents)[offset : offset + num_bytes]


def test_the_page_cache_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write of a block goes to a descriptor with O_DIRECT, on a file system that has it."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
        has_direct_access = True
    except OSError:
        has_direct_access = False
    seen = []
    write = os.write

    def spy(descriptor: int, content: Any) -> int:
        seen.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", spy)
    write_direct(tmp_path / "file", contents_of([3 * BLOCK_BYTES + 1]), BLOCK_BYTES)
    assert seen == [has_direct_access] * 4


Refuse = Callable[[pytest.MonkeyPatch], None]


def no_direct_access(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system without O_DIRECT answers."""
    control = fcntl.fcntl

    def refuse(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(descriptor, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)


def another_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system answers that has O_DIRECT, but not for these blocks."""
    for name in ("write", "preadv"):
        call = getattr(os, name)

        def refuse(descriptor: int, *arguments: Any, call: Callable[..., int] = call) -> int:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return call(descriptor, *arguments)

        monkeypatch.setattr(os, name, refuse)


@pytest.mark.parametrize("refuse", [no_direct_access, another_alignment])
def test_where_there_is_no_direct_access_the_cache_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refuse
) -> None:
    refuse(monkeypatch)
    contents = contents_of([5, 2 * BLOCK_BYTES, 77])
    write_direct(tmp_path / "file", contents, BLOCK_BYTES)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        set_direct(descriptor, True)
        got = read_range(descriptor, aligned_buffer(4 * BLOCK_BYTES), 3, 2 * BLOCK_BYTES)
    finally:
        os.close(descriptor)
    assert got.numpy().tobytes() == joined(contents)[3 : 3 + 2 * BLOCK_BYTES]


def test_what_the_contents_raise_reaches_the_caller(tmp_path: Path) -> None:
    def contents() -> Iterator[torch.Tensor]:
        yield torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        write_direct(tmp_path / "file", contents())


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(FileExistsError):
        write_direct(tmp_path / "file", contents_of([1]))
    assert (tmp_path / "file").read_text() == "precious"


def test_one_ahead_is_one_ahead() -> None:
    """When the caller has an item, the next one may be in the making, and the one after that not yet begun."""
    begun = []

    def items() -> Iterator[int]:
        for item in range(6):
            begun.append(item)
            yield item

    for item in one_ahead(items()):
        assert len(begun) <= item + 2
    assert begun == list(range(6))
