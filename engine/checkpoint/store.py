"""Files of tensors: written front to back while they are hashed, read back piece by piece into any layout's shards.

A file is a safetensors file (an 8-byte length, a JSON header, raw bytes), so that other tools open it too. It is written here
rather than by the safetensors library because that serialises from whole tensors in one call: no hashing on the way,
a second copy in memory, and no say over fsync.

    write_file   pieces -> rank_00003.safetensors, and what the manifest says of it
    load         manifest + targets of this layout -> each target filled from the pieces that intersect it

A loader reads each piece that it needs once, whole, into one reused buffer, checks its hash and copies the intersections: memory
is bounded by the largest piece, whatever the two layouts are.
"""

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import xxhash

from engine.checkpoint.boxes import box_shape, flat_boxes, intersect, within
from engine.checkpoint.fingerprint import combine, range_fingerprint, to_text
from engine.checkpoint.manifest import DTYPE_BYTES, PIECE_BYTES, DataFile, DType, Kind, Manifest, Piece
from engine.data.files import sync
from engine.errors import CheckpointError
from engine.shard_spec import Box

TORCH_DTYPES: dict[DType, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
DTYPE_NAMES: dict[torch.dtype, DType] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
SAFETENSORS_NAMES: dict[DType, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}

T = TypeVar("T")
R = TypeVar("R")

_ALIGNMENT = 8
"""The header is padded so that the data begin at a multiple of this, as the safetensors format asks."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A flat range of a tensor as this rank holds it: what is saved, or a place to be filled.

    Attributes:
        name, kind: of the tensor.
        shape: its logical global shape.
        box: the local box that the range is cut from.
        start: where the range begins in the row-major box.
        values: 1-D, the elements from there on; any device, contiguous.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    box: Box
    start: int
    values: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + len(self.values)


def write_file(path: Path, shards: Sequence[Shard], piece_bytes: int = PIECE_BYTES) -> DataFile:
    """Write shards as one safetensors file and bring it to the disk; returns its entry in the manifest.

    Args:
        path: of a file that does not exist yet, in an existing folder.
        shards: what to save, in this order.
        piece_bytes: a longer shard becomes several pieces.

    Raises:
        OSError: the disk is full, the folder cannot be written, ...; the file is left as far as it got.
    """
    parts = [part for shard in shards for part in _cut(shard, piece_bytes)]
    header: dict[str, object] = {}
    offset = 0
    for part in parts:
        num_bytes = part.values.numel() * part.values.element_size()
        header[entry_name(part.kind, part.name, part.shape, part.box, part.start)] = {
            "dtype": SAFETENSORS_NAMES[DTYPE_NAMES[part.values.dtype]],
            "shape": [part.values.numel()],
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    try:
        return _write_parts(path, struct.pack("<Q", len(text)) + text, parts)
    except OSError as error:
        # A write that fails does not say of which file.
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write_parts(path: Path, header: bytes, parts: Sequence[Shard]) -> DataFile:
    pieces = []
    with path.open("xb", buffering=0) as handle, closing(_one_ahead(_hash, parts)) as hashed:
        at = _write(handle.fileno(), header)
        for part, (values, xxh3, number) in zip(parts, hashed, strict=True):
            pieces.append(
                Piece(
                    name=part.name,
                    kind=part.kind,
                    dtype=DTYPE_NAMES[values.dtype],
                    box=part.box,
                    start=part.start,
                    stop=part.stop,
                    offset=at,
                    xxh3=xxh3,
                    fingerprint=to_text(number),
                )
            )
            written = _write(handle.fileno(), _raw(values))
            # The kernel starts to write these pages now, while the next piece is hashed, and need not keep them.
            os.posix_fadvise(handle.fileno(), at, written, os.POSIX_FADV_DONTNEED)
            at += written
        sync(handle.fileno())
    return DataFile(name=path.name, num_bytes=at, pieces=tuple(pieces))


def _hash(part: Shard) -> tuple[torch.Tensor, str, int]:
    """(the values in host memory, xxh3 of their bytes, their part of the fingerprint)."""
    values = part.values.detach().cpu()
    number = range_fingerprint(values, part.name, part.kind, part.shape, part.box, part.start)
    return values, xxhash.xxh3_64_hexdigest(_raw(values)), number


def _one_ahead(function: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
    """`function` of each item, in a thread, which is at work on the next while the caller uses the one before."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-hash") as thread:
        pending: Future[R] | None = None
        for item in items:
            following = thread.submit(function, item)
            if pending is not None:
                yield pending.result()
            pending = following
        if pending is not None:
            yield pending.result()


def entry_name(kind: Kind, name: str, shape: tuple[int, ...], box: Box, start: int) -> str:
    """What a piece is called in its safetensors file: `kind:name@index`, unique among disjoint pieces.

    The index is that of its first element in the row-major global tensor.
    """
    first, _ = next(flat_boxes(box, start, start + 1))
    index = 0
    for (low, _), size in zip(first, shape, strict=True):
        index = index * size + low
    return f"{kind}:{name}@{index}"


def fingerprints(pieces: Iterable[Piece]) -> dict[Kind, str]:
    """The fingerprint of each kind, from those of its pieces."""
    sums: dict[Kind, list[int]] = {}
    for piece in pieces:
        sums.setdefault(piece.kind, []).append(int(piece.fingerprint, 16))
    return {kind: to_text(combine(parts)) for kind, parts in sums.items()}


class PieceReader:
    """Reads pieces of one checkpoint, checked, into two buffers in turn. Use as a context manager: it holds open files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[str, int] = {}
        self._buffers = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]

    def __enter__(self) -> "PieceReader":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def read(self, file: DataFile, piece: Piece) -> torch.Tensor:
        """The piece's elements, 1-D; valid until the call after the next.

        Raises:
            CheckpointError: the file cannot be read, ends early, or its bytes are not those that were written.
        """
        self._buffers.reverse()
        if len(self._buffers[0]) < piece.num_bytes:
            self._buffers[0] = torch.empty(piece.num_bytes, dtype=torch.uint8)
        raw = self._buffers[0][: piece.num_bytes]
        view = raw.numpy().data
        try:
            descriptor = self._descriptors.get(file.name)
            if descriptor is None:
                descriptor = self._descriptors[file.name] = os.open(self._folder / file.name, os.O_RDONLY)
            got = 0
            while got < piece.num_bytes and (read := os.preadv(descriptor, [view[got:]], piece.offset + got)):
                got += read
        except OSError as error:
            raise CheckpointError(
                f"{self._folder / file.name} cannot be read: {error.strerror or error}. Its tensors are missing, and a run that "
                "went on without them would train other weights. Restore the file, or load another checkpoint."
            ) from None
        if got < piece.num_bytes or xxhash.xxh3_64_hexdigest(view) != piece.xxh3:
            found = (
                f"ends after {got:,} of {piece.num_bytes:,} bytes"
                if got < piece.num_bytes
                else f"does not have the xxh3 {piece.xxh3} that was recorded when it was written"
            )
            raise CheckpointError(
                f"{self._folder / file.name} is damaged: {piece.kind} of {piece.name} (elements {piece.start:,} to {piece.stop:,} "
                f"of the box {_box_text(piece.box)}) {found}. Restore the file from a copy, or load "
                "another checkpoint."
            )
        return raw.view(TORCH_DTYPES[piece.dtype])


def load(folder: Path, manifest: Manifest, targets: Sequence[Shard]) -> None:
    """Fill every target from the checkpoint, whatever layout wrote it. Dtypes are converted where they differ.

    Raises:
        CheckpointError: a tensor is not in the checkpoint, has another shape, is not wholly there, or is damaged.
    """
    by_tensor: dict[tuple[str, Kind], list[Shard]] = {}
    for target in targets:
        info = manifest.tensors.get(target.name)
        if info is None or info.shape != target.shape:
            there = "is not in it" if info is None else f"has the shape {list(info.shape)} there"
            raise CheckpointError(
                f"{folder}: {target.name} {there}; this model has it with {list(target.shape)}. The checkpoint is of another "
                "model, and what it lacks would stay random. Give the config that it was trained with."
            )
        by_tensor.setdefault((target.name, target.kind), []).append(target)
    wanted = list(_wanted(manifest, by_tensor))
    filled: Counter[int] = Counter()
    with PieceReader(folder) as reader:
        # The next piece is read and hashed while this one is put in place.
        pieces = _one_ahead(lambda one: reader.read(manifest.files[one.file], one.piece), wanted)
        with closing(pieces):
            for one, values in zip(wanted, pieces, strict=True):
                for target, (source, place, common) in one.overlaps:
                    target.values[place.start : place.stop].view(box_shape(place.box))[within(common, place.box)].copy_(
                        values[source.start : source.stop].view(box_shape(source.box))[within(common, source.box)]
                    )
                    filled[id(target)] += math.prod(box_shape(common))
    for target in targets:
        if filled[id(target)] != len(target.values):
            raise CheckpointError(
                f"{folder}: {target.kind} of {target.name} is there only in part: {filled[id(target)]:,} of {len(target.values):,} "
                f"elements of the box {_box_text(target.box)} that this rank needs. What is missing would stay random."
            )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A piece to be read, the number of its file, and where it goes."""

    file: int
    piece: Piece
    overlaps: "list[tuple[Shard, tuple[_Part, _Part, Box]]]"


def _wanted(manifest: Manifest, by_tensor: Mapping[tuple[str, Kind], Sequence[Shard]]) -> Iterator[_Wanted]:
    """The pieces that meet a target, in the order of the files: front to back is how disks read."""
    candidates = sorted(
        (found for key in by_tensor for found in manifest.pieces_by_tensor.get(key, ())),
        key=lambda found: (found[0], found[1].offset),
    )
    for file, piece in candidates:
        targets = by_tensor[piece.name, piece.kind]
        overlaps = [(target, overlap) for target in targets for overlap in _overlaps(piece, target)]
        if overlaps:
            yield _Wanted(file, piece, overlaps)


@dataclass(frozen=True, slots=True)
class _Part:
    """One box of a range, and where its elements stand in the range's values."""

    box: Box
    start: int
    stop: int


def _overlaps(piece: Piece, target: Shard) -> Iterator[tuple[_Part, _Part, Box]]:
    """(part of the piece, part of the target, their intersection) for every pair that meets."""
    if intersect(piece.box, target.box) is None:
        return
    wanted = _parts(target.box, target.start, target.stop)
    for source in _parts(piece.box, piece.start, piece.stop):
        for want in wanted:
            if (common := intersect(source.box, want.box)) is not None:
                yield source, want, common


def _parts(box: Box, start: int, stop: int) -> list[_Part]:
    return [
        _Part(part, at - start, at - start + math.prod(box_shape(part))) for part, at in flat_boxes(box, start, stop)
    ]


def _cut(shard: Shard, piece_bytes: int) -> Iterator[Shard]:
    numel = max(1, piece_bytes // shard.values.element_size())
    for at in range(0, len(shard.values), numel):
        values = shard.values[at : at + numel]
        yield Shard(shard.name, shard.kind, shard.shape, shard.box, shard.start + at, values)


def _raw(values: torch.Tensor) -> memoryview:
    """The bytes of contiguous values in host memory, without a copy."""
    return values.view(torch.uint8).numpy().data


def _write(descriptor: int, content: bytes | memoryview) -> int:
    """All of it: one call may write less."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]
    return len(content)


def _box_text(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
