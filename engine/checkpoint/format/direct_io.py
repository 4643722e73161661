"""Reads and writes files past the page cache with O_DIRECT, in whole aligned blocks.

A thread prepares the next buffer while the caller uses the present one. Caching a checkpoint would evict the data that training
reads, and take CPU time. If a file system has no direct access, or needs another alignment, the same blocks go through the cache.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from triaxis.engine.device.pinned_memory import aligned_buffer
from triaxis.engine.storage.files import sync

BLOCK_BYTES = 4096
"""Offsets, lengths and addresses are multiples of this: the largest sector of today's disks, and a page (`PAGE_BYTES`)."""

STAGING_BYTES = 32 * 2**20
"""Length of a staging buffer. A shorter one would be full before the previous one is on the disk, and hashing would wait."""

T = TypeVar("T")


def write_direct(path: Path, contents: Iterable[torch.Tensor], staging_bytes: int = STAGING_BYTES) -> int:
    """Write a new file, sync it to disk, and return its length in bytes.

    Args:
        path: path of the new file.
        contents: 1-D uint8 tensors in host memory, consecutive in the file, iterated over in a thread.
        staging_bytes: length of each of the two buffers, a multiple of `BLOCK_BYTES`.

    Raises:
        OSError: the file cannot be written; a partial file is left.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        set_direct(descriptor, True)
        length = 0
        with closing(one_ahead(_packed(contents, staging_bytes))) as packed:
            for buffer, filled in packed:
                # The last block is written whole and truncated below.
                left = buffer[: _up(filled)].numpy().data
                while left:
                    left = left[_retried(descriptor, partial(os.write, descriptor, left)) :]
                length += filled
        os.ftruncate(descriptor, length)
        sync(descriptor)
    finally:
        os.close(descriptor)
    return length


def _packed(contents: Iterable[torch.Tensor], staging_bytes: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Pack the contents into two alternating buffers, and yield (buffer, filled bytes).

    Only the last buffer may be partly filled.
    """
    buffers = [aligned_buffer(staging_bytes), aligned_buffer(staging_bytes)]
    filled = 0
    for content in contents:
        at = 0
        while at < len(content):
            numel = min(len(content) - at, staging_bytes - filled)
            buffers[0][filled : filled + numel].copy_(content[at : at + numel])
            at += numel
            filled += numel
            if filled == staging_bytes:
                yield buffers[0], filled
                buffers.reverse()
                filled = 0
    if filled:
        yield buffers[0], filled


def read_range(descriptor: int, buffer: torch.Tensor, offset: int, num_bytes: int) -> torch.Tensor:
    """Read bytes [offset, offset + num_bytes) of a file through `buffer`.

    Args:
        descriptor: file descriptor open for reading, direct or not.
        buffer: memory from `aligned_buffer`, at least `num_bytes` + 2 blocks long.

    Returns:
        A 1-D uint8 view of `buffer`; shorter than `num_bytes` if the file ends before.

    Raises:
        OSError: the read failed.
    """
    lead = offset % BLOCK_BYTES
    whole = buffer[: _up(lead + num_bytes)].numpy().data
    got = 0
    while got < lead + num_bytes:
        read = _retried(descriptor, partial(os.preadv, descriptor, [whole[got:]], offset - lead + got))
        got += read
        if read == 0 or got % BLOCK_BYTES:
            break  # the end of the file
    return buffer[lead : max(lead, min(got, lead + num_bytes))]


def set_direct(descriptor: int, direct: bool) -> None:
    """Switch an open file's direct access. A file system without direct access (EINVAL) keeps using its cache."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def _retried(descriptor: int, call: Callable[[], int]) -> int:
    """Run `call`. If the file system refuses the blocks with EINVAL, `call` runs once more through the cache."""
    try:
        return call()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    set_direct(descriptor, False)
    return call()


def one_ahead(items: Iterator[T]) -> Generator[T, None, None]:
    """Yield the items. A thread computes the next item while the caller uses the present one."""
    end = object()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-ahead") as thread:
        following = thread.submit(next, items, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, items, end)
            yield item  # type: ignore[misc]


def _up(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
