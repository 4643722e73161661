"""Writes hashed tensor files, and reads them back piece by piece for any layout.

Files have the safetensors format, so other tools can open them. The safetensors library is not used, because it copies whole
tensors and hashes nothing.

    write_file   writes shards to rank_00003.safetensors, and returns the file's entry in the manifest
    load         fills each target of this layout from the pieces that intersect the target

A loader reads each piece once into one of two reused buffers, checks the hash and copies the intersections. Memory is bounded by
two pieces in any layout.
"""

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

import torch
import xxhash

from triaxis.engine.checkpoint.format.boxes import box_shape, flat_boxes, intersect, within
from triaxis.engine.checkpoint.format.direct_io import BLOCK_BYTES, one_ahead, read_range, set_direct, write_direct
from triaxis.engine.checkpoint.format.fingerprint import combine, range_fingerprint, to_text
from triaxis.engine.checkpoint.format.manifest import DTYPE_BYTES, PIECE_BYTES, DataFile, DType, Kind, Manifest, Piece
from triaxis.engine.device.pinned_memory import aligned_buffer
from triaxis.engine.errors import CheckpointError
from triaxis.engine.layout.shard_spec import Box

TORCH_DTYPES: dict[DType, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
DTYPE_NAMES: dict[torch.dtype, DType] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
SAFETENSORS_NAMES: dict[DType, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}

_ALIGNMENT = 8
"""Alignment in bytes of the data after the header, as the safetensors format requires."""


class Values(Protocol):
    """A 1-D sequence of floating-point elements, either a tensor or a `StoredState` of the optimizer."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements in the file."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, where: slice, /) -> Self: ...
    def cpu(self) -> torch.Tensor:
        """Return the elements as a tensor of `dtype` in host memory."""
        ...


V = TypeVar("V", bound=Values, covariant=True)


@dataclass(frozen=True, slots=True)
class Shard(Generic[V]):
    """A flat range of a tensor on this rank, to be saved or filled.

    Attributes:
        name, kind: name and kind of the tensor.
        shape: the tensor's logical global shape.
        box: the rank's local box of the tensor, which contains the range.
        start: index of the range's first element in the row-major box.
        values: the range's elements; if this is a tensor, it is 1-D and contiguous, on any device.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    box: Box
    start: int
    values: V

    @property
    def stop(self) -> int:
        return self.start + len(self.values)


def write_file(path: Path, shards: Sequence[Shard[Values]], piece_bytes: int = PIECE_BYTES) -> DataFile:
    """Write shards as one safetensors file, sync it to disk, and return its manifest entry.

    Args:
        path: new file in an existing folder.
        shards: shards to save, in file order.
        piece_bytes: maximum length of a piece; a longer shard is split.

    Raises:
        OSError: the file cannot be written; a partial file is left.
    """
    parts = [part for shard in shards for part in _cut(shard, piece_bytes)]
    header: dict[str, object] = {}
    offset = 0
    for part in parts:
        num_bytes = len(part.values) * part.values.dtype.itemsize
        header[entry_name(part.kind, part.name, part.shape, part.box, part.start)] = {
            "dtype": SAFETENSORS_NAMES[DTYPE_NAMES[part.values.dtype]],
            "shape": [len(part.values)],
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    pieces: list[Piece] = []
    try:
        num_bytes = write_direct(path, _stream(struct.pack("<Q", len(text)) + text, parts, pieces))
    except OSError as error:
        # The OSError from a failed write has no file name.
        raise OSError(error.errno, error.strerror, str(path)) from error
    return DataFile(name=path.name, num_bytes=num_bytes, pieces=tuple(pieces))


def _stream(header: bytes, parts: Sequence[Shard[Values]], pieces: list[Piece]) -> Iterator[torch.Tensor]:
    """Yield the file's bytes, the header first. Hash each part, and append its manifest entry to `pieces`."""
    yield torch.frombuffer(bytearray(header), dtype=torch.uint8)
    at = len(header)
    for part in parts:
        values = part.values.cpu().detach()
        raw = values.view(torch.uint8)
        number = range_fingerprint(values, part.name, part.kind, part.shape, part.box, part.start)
        pieces.append(
            Piece(
                name=part.name,
                kind=part.kind,
                dtype=DTYPE_NAMES[values.dtype],
                box=part.box,
                start=part.start,
                stop=part.stop,
                offset=at,
                xxh3=xxhash.xxh3_64_hexdigest(raw.numpy().data),
                fingerprint=to_text(number),
            )
        )
        yield raw
        at += len(raw)


def entry_name(kind: Kind, name: str, shape: tuple[int, ...], box: Box, start: int) -> str:
    """Name a piece in its safetensors file as `kind:name@index`, unique among disjoint pieces.

    The index is the position of the piece's first element in the row-major global tensor.
    """
    first, _ = next(flat_boxes(box, start, start + 1))
    index = 0
    for (low, _), size in zip(first, shape, strict=True):
        index = index * size + low
    return f"{kind}:{name}@{index}"


def fingerprints(pieces: Iterable[Piece]) -> dict[Kind, str]:
    """Combine the pieces' fingerprints into one per kind."""
    sums: dict[Kind, list[int]] = {}
    for piece in pieces:
        sums.setdefault(piece.kind, []).append(int(piece.fingerprint, 16))
    return {kind: to_text(combine(parts)) for kind, parts in sums.items()}


class PieceReader:
    """A context manager that reads one checkpoint's pieces and checks their hashes.

    Two buffers are used in turn, so a piece survives one more read, but not two.

    Args:
        folder: folder of the checkpoint.
        direct: bypass the page cache, for bytes that no other process on this host reads.
    """

    def __init__(self, folder: Path, direct: bool = True) -> None:
        self._folder, self._direct = folder, direct
        self._descriptors: dict[str, int] = {}
        self._buffers = [aligned_buffer(0), aligned_buffer(0)]

    def __enter__(self) -> "PieceReader":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def read(self, file: DataFile, piece: Piece) -> torch.Tensor:
        """Read and check a piece's elements, 1-D. The second call after this one overwrites the elements.

        Raises:
            CheckpointError: the file cannot be read, ends early, or differs from what was written.
        """
        return self.check(file, piece, self.fetch(file, piece.offset, piece.num_bytes))

    def fetch(self, file: DataFile, offset: int, num_bytes: int) -> torch.Tensor:
        """Read raw bytes, uint8 [num_bytes], or fewer if the file ends early.

        Raises:
            CheckpointError: the file cannot be read.
        """
        self._buffers.reverse()
        if len(self._buffers[0]) < (room := num_bytes + 2 * BLOCK_BYTES):
            self._buffers[0] = aligned_buffer(room)
        try:
            return read_range(self._descriptor(file), self._buffers[0], offset, num_bytes)
        except OSError as error:
            raise CheckpointError(
                f"{self._folder / file.name} cannot be read: {error.strerror or error}. Its tensors are missing, and a run that "
                "went on without them would train other weights. Restore the file, or load another checkpoint."
            ) from None

    def check(self, file: DataFile, piece: Piece, raw: torch.Tensor) -> torch.Tensor:
        """Check that `raw` holds the bytes that were written, and view it as the piece's elements.

        Raises:
            CheckpointError: the bytes differ, or are too few.
        """
        if len(raw) < piece.num_bytes or xxhash.xxh3_64_hexdigest(raw.numpy().data) != piece.xxh3:
            found = (
                f"ends after {len(raw):,} of {piece.num_bytes:,} bytes"
                if len(raw) < piece.num_bytes
                else f"does not have the xxh3 {piece.xxh3} that was recorded when it was written"
            )
            raise CheckpointError(
                f"{self._folder / file.name} is damaged: {piece.kind} of {piece.name} (elements {piece.start:,} to {piece.stop:,} "
                f"of the box {_box_text(piece.box)}) {found}. Restore the file from a copy, or load "
                "another checkpoint."
            )
        dtype = TORCH_DTYPES[piece.dtype]
        if raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()  # misaligned, after a piece with a smaller dtype
        return raw.view(dtype)

    def _descriptor(self, file: DataFile) -> int:
        descriptor = self._descriptors.get(file.name)
        if descriptor is None:
            descriptor = self._descriptors[file.name] = os.open(self._folder / file.name, os.O_RDONLY)
            set_direct(descriptor, self._direct)
        return descriptor


def load(folder: Path, manifest: Manifest, targets: Sequence[Shard[torch.Tensor]]) -> None:
    """Fill every target from a checkpoint of any layout, converting dtypes if they differ.

    Raises:
        CheckpointError: a tensor is missing, incomplete, damaged or has another shape.
    """
    by_tensor: dict[tuple[str, Kind], list[Shard[torch.Tensor]]] = {}
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
    # If this rank needs only part of a piece, another rank, perhaps on this host, needs the rest: then the page cache helps.
    with (
        PieceReader(folder, direct=all(one.is_whole for one in wanted)) as reader,
        # The disk reads the next piece while this one is hashed and copied.
        closing(one_ahead(_fetched(reader, manifest, wanted))) as pieces,
    ):
        for one, raw in ((one, raw) for fetched in pieces for one, raw in fetched):
            values = reader.check(manifest.files[one.file], one.piece, raw)
            for target, (source, place, common) in one.overlaps:
                target.values[place.start : place.stop].view(box_shape(place.box))[within(common, place.box)].copy_(
                    values[source.start : source.stop].view(box_shape(source.box))[within(common, source.box)]
                )
                filled[id(target)] += math.prod(box_shape(common))
    for target in targets:
        if filled[id(target)] != len(target.values):
            raise CheckpointError(
                f"{folder}: {target.kind} of {target.name} is there only in part: {filled[id(target)]:,} of {len(target.values):,} "
                f"elements of the box {_box_text(target.box)} that this rank needs. The missing elements would keep random values."
            )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A piece to read, the index of its file in the manifest, and its destinations.

    An overlap is (target, (part of the piece, part of the target, their intersection as a global box)).
    """

    file: int
    piece: Piece
    overlaps: "list[tuple[Shard[torch.Tensor], tuple[_Part, _Part, Box]]]"

    @property
    def is_whole(self) -> bool:
        """Whether this rank needs the whole piece. It does if the layout has not changed."""
        return sum(math.prod(box_shape(common)) for _, (_, _, common) in self.overlaps) == self.piece.numel


def _wanted(
    manifest: Manifest, by_tensor: Mapping[tuple[str, Kind], Sequence[Shard[torch.Tensor]]]
) -> Iterator[_Wanted]:
    """Yield, in file order, the saved pieces that hold elements of this rank's shards."""
    candidates = sorted(
        (found for key in by_tensor for found in manifest.pieces_by_tensor.get(key, ())),
        key=lambda found: (found[0], found[1].offset),
    )
    for file, piece in candidates:
        targets = by_tensor[piece.name, piece.kind]
        overlaps = [(target, overlap) for target in targets for overlap in _overlaps(piece, target)]
        if overlaps:
            yield _Wanted(file, piece, overlaps)


def _fetched(
    reader: PieceReader, manifest: Manifest, wanted: Sequence[_Wanted]
) -> Iterator[list[tuple[_Wanted, torch.Tensor]]]:
    """Yield a list of (piece, bytes) for each run of adjoining pieces in a file, at most `PIECE_BYTES` together."""
    for run in _runs(wanted):
        first, last = run[0].piece, run[-1].piece
        raw = reader.fetch(manifest.files[run[0].file], first.offset, last.offset + last.num_bytes - first.offset)
        starts = [one.piece.offset - first.offset for one in run]
        yield [(one, raw[start : start + one.piece.num_bytes]) for one, start in zip(run, starts, strict=True)]


def _runs(wanted: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
    run: list[_Wanted] = []
    for one in wanted:
        if run:
            start, stop = run[0].piece.offset, run[-1].piece.offset + run[-1].piece.num_bytes
            end = one.piece.offset + one.piece.num_bytes
            if one.file != run[0].file or one.piece.offset != stop or end - start > PIECE_BYTES:
                yield run
                run = []
        run.append(one)
    if run:
        yield run


@dataclass(frozen=True, slots=True)
class _Part:
    """A box that elements [start, stop) of a flat range fill exactly. A range splits into one or more such boxes."""

    box: Box
    start: int
    stop: int


def _overlaps(piece: Piece, target: Shard[torch.Tensor]) -> Iterator[tuple[_Part, _Part, Box]]:
    """Yield (part of the piece, part of the target, intersection) for every pair that intersects."""
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


def _cut(shard: Shard[Values], piece_bytes: int) -> Iterator[Shard[Values]]:
    numel = max(1, piece_bytes // shard.values.dtype.itemsize)
    for at in range(0, len(shard.values), numel):
        yield replace(shard, start=shard.start + at, values=shard.values[at : at + numel])


def _box_text(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
