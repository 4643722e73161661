"""Builds a large epoch's order in pieces, so that a kill loses at most one.

Each line shows a piece's input, the operation, and where the result goes:

    a block of numbers (random bits | index)      -- sort -->       FILE.runs, one sorted run per block
    a range of values, collected from all runs    -- sort -->       its place in FILE.building
    a block of document lengths, shuffled         -- add up -->     token offsets in FILE.building

The journal FILE.done counts a piece after the files were synced to the disk. No two numbers are equal, so the result is identical
to `triaxis.engine.data.shuffle.permutation`. At the end, FILE.building becomes the cache file.
"""

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from triaxis.engine.data.index_cache import HEAD_BYTES, Progress, key_digest, seal
from triaxis.engine.data.shuffle import random_bits
from triaxis.engine.storage.files import sync, write_atomically
from triaxis.engine.storage.state_files import read_object

PIECE = 2**24
"""Numbers per piece, a multiple of 4: 128 MiB, sorted in about two seconds."""

Int64s = NDArray[np.int64]
_Steps = Iterator[Callable[[], None]]


def done_path(path: Path) -> Path:
    """Return the path of the journal that counts a cache file's finished pieces."""
    return path.with_name(f"{path.name}.done")


def fill_epoch(
    path: Path, key: str, seed: int, epoch: int, document_lengths: Int64s, num_samples: int, progress: Progress
) -> None:
    """Write an epoch's document order, token offsets and sample order to its cache file.

    The pieces that a killed process finished are kept.

    Args:
        path: path for the cache file.
        key: the `EpochKey` as text, to recognise the file: its hash covers the key, and pieces for another key are not kept.
        seed, epoch: seed and epoch number for both orders.
        document_lengths: tokens per document, int64 [D].
        num_samples: samples per epoch.
        progress: observer notified after each piece.

    Raises:
        OSError: the folder cannot be written.
    """
    num_documents = len(document_lengths)
    building, runs_path = (path.with_name(f"{path.name}.{kind}") for kind in ("building", "runs"))
    count, longest = 2 * num_documents + 1 + num_samples, max(num_documents, num_samples)
    # A journal whose files are missing or have other sizes counts for nothing.
    name = key_digest(json.dumps([key, PIECE, count]))
    done = _num_done(path, name, {building: HEAD_BYTES + 8 * count, runs_path: 8 * longest})
    with _reserved(building, HEAD_BYTES + 8 * count) as file, _reserved(runs_path, 8 * longest) as runs_file:
        numbers = np.memmap(building, np.int64, "r+", HEAD_BYTES, (count,))
        runs = np.memmap(runs_path, np.uint64, "r+", 0, (longest,))
        order, offsets = numbers[:num_documents], numbers[num_documents : 2 * num_documents + 1]
        steps = [
            *_sorting(order, runs, "documents", seed, epoch),
            *_adding(order, offsets, document_lengths),
            *_sorting(numbers[2 * num_documents + 1 :], runs, "samples", seed, epoch),
        ]
        for number, step in enumerate(steps):
            if number >= done:
                step()
                numbers.flush()
                runs.flush()
                sync(file.fileno())
                sync(runs_file.fileno())
                journal = {"name": name, "done": number + 1, "of": len(steps)}
                write_atomically(done_path(path), [json.dumps(journal).encode()])
            progress.piece(path, number + 1, len(steps))
        del numbers, runs, order, offsets, steps
    seal(building, path, key, progress)
    for left in (runs_path, done_path(path)):
        left.unlink(missing_ok=True)


def pieces_done(path: Path) -> tuple[int, int]:
    """Read an epoch order's (finished pieces, all pieces) from the cache file's journal; (0, 0) if missing."""
    try:
        found = read_object(done_path(path)) or {}
        return int(found["done"]), int(found["of"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0


def _num_done(path: Path, name: str, sizes: dict[Path, int]) -> int:
    try:
        journal = read_object(done_path(path)) or {}
        is_whole = all(file.stat().st_size == size for file, size in sizes.items())
    except (OSError, ValueError):
        return 0
    return pieces_done(path)[0] if is_whole and journal.get("name") == name else 0


def _reserved(path: Path, size: int) -> BinaryIO:
    """Open a file and allocate its `size` bytes, so that a full disk raises no SIGBUS."""
    file = path.open("r+b" if path.exists() else "w+b")
    try:
        file.truncate(size)
        os.posix_fallocate(file.fileno(), 0, size)
    except BaseException:
        file.close()
        raise
    return file


def _blocks(count: int) -> list[tuple[int, int]]:
    return [(start, min(count, start + PIECE)) for start in range(0, count, PIECE)]


def _sorting(out: Int64s, runs: NDArray[np.uint64], *key: int | str) -> _Steps:
    """Yield functions that together write `permutation(len(out), *key)` to `out`. `runs` holds sorted blocks."""
    count = len(out)
    index_bits = np.uint64(max(count - 1, 0).bit_length())
    mask = (np.uint64(1) << index_bits) - np.uint64(1)
    blocks = _blocks(count)

    def sort_block(start: int, stop: int) -> None:
        numbers = (random_bits(stop - start, *key, skip=start) >> index_bits << index_bits) | np.arange(
            start, stop, dtype=np.uint64
        )
        numbers.sort()
        runs[start:stop] = numbers

    def sort_values(part: int) -> None:
        # The numbers are uniform, so equal parts of their range hold about PIECE numbers each.
        least = np.uint64(part * 2**64 // len(blocks))
        firsts = [int(np.searchsorted(runs[start:stop], least)) for start, stop in blocks]
        lasts = [stop - start for start, stop in blocks]
        if part + 1 < len(blocks):
            beyond = np.uint64((part + 1) * 2**64 // len(blocks))
            lasts = [int(np.searchsorted(runs[start:stop], beyond)) for start, stop in blocks]
        spans = zip(blocks, firsts, lasts, strict=True)
        numbers = np.concatenate([runs[start + first : start + last] for (start, _), first, last in spans])
        numbers.sort()
        place = sum(firsts)
        out[place : place + len(numbers)] = (numbers & mask).astype(np.int64)

    for start, stop in blocks:
        yield partial(sort_block, start, stop)
    for part in range(len(blocks)):
        yield partial(sort_values, part)


def _adding(order: Int64s, offsets: Int64s, lengths: Int64s) -> _Steps:
    """Yield functions for the caller to run in turn; each fills a part of `offsets`.

    Together they write the running sum, from 0, of document lengths in `order`.
    """

    def add(start: int, stop: int) -> None:
        if start == 0:
            offsets[0] = 0
        np.cumsum(lengths[order[start:stop]], out=offsets[start + 1 : stop + 1])
        offsets[start + 1 : stop + 1] += offsets[start]

    for start, stop in _blocks(len(order)):
        yield partial(add, start, stop)
