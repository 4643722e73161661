"""Compares every byte of a checkpoint with its manifest, in one process.

    manifest.sha256      checks the next file's bytes
    manifest.json        checks its fields, file sizes, and one copy of each tensor element
    safetensors header   checks names, dtypes and offsets, which other tools read
    xxh3                 checks every piece's bytes
    fingerprint          checks every piece's values, and the sum per kind of tensor

One piece is in memory at a time. The check goes on after a fault and reports all faults.
"""

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from triaxis.engine.checkpoint.format.fingerprint import combine, range_fingerprint, to_text
from triaxis.engine.checkpoint.format.manifest import DataFile, Kind, Manifest, Piece, manifest_problems, parse_manifest
from triaxis.engine.checkpoint.format.store import SAFETENSORS_NAMES, PieceReader, entry_name
from triaxis.engine.errors import CheckpointError

_MOST_HEADER_BYTES = 100 * 2**20
"""Longest safetensors header: the format's own limit."""


@dataclass(frozen=True, slots=True)
class CheckpointCheck:
    """The result of checking one checkpoint.

    Attributes:
        folder: checkpoint folder.
        manifest: the checkpoint's manifest; None if it cannot be read.
        problems: messages for all faults, each with the file's name; empty if every byte is as it was written.
        fingerprint: fingerprint for each kind of tensor (weights, optimizer states), computed from the bytes that could be read.
    """

    folder: Path
    manifest: Manifest | None
    problems: tuple[str, ...]
    fingerprint: dict[Kind, str]


def check_files(folder: Path, progress: Callable[[int], None]) -> CheckpointCheck:
    """Read a whole checkpoint and collect its faults.

    A file is not read if its size, or the byte range of one of its pieces, contradicts the manifest.

    Args:
        folder: checkpoint folder.
        progress: function (number of bytes) that is called after each piece.
    """
    try:
        manifest = parse_manifest(folder)
    except CheckpointError as error:
        return CheckpointCheck(folder, None, (str(error),), {})
    problems = manifest_problems(folder, manifest)
    # A misplaced piece would be read as another tensor. Files without a problem are still worth reading.
    sound = [file for file in manifest.files if not any(text.startswith(f"{file.name}: ") for text in problems)]
    sums: dict[Kind, list[int]] = {}
    with PieceReader(folder) as reader:
        for file in sound:
            problems += header_problems(folder / file.name, file, manifest)
            for piece in file.pieces:
                try:
                    values = reader.read(file, piece)
                except CheckpointError as error:
                    problems.append(str(error))
                    progress(piece.num_bytes)
                    continue
                number = _fingerprint(values, piece, manifest)
                sums.setdefault(piece.kind, []).append(number)
                if to_text(number) != piece.fingerprint:
                    problems.append(
                        f"{file.name}: {piece.kind}:{piece.name}@{piece.start} has the fingerprint {to_text(number)}, and "
                        f"{piece.fingerprint} in the manifest"
                    )
                progress(piece.num_bytes)
    computed = {kind: to_text(combine(parts)) for kind, parts in sums.items()}
    if not problems and computed != manifest.fingerprint:
        problems.append(f"manifest.json: its fingerprint is {manifest.fingerprint}, that of its tensors {computed}")
    return CheckpointCheck(folder, manifest, tuple(problems), computed)


def _fingerprint(values: torch.Tensor, piece: Piece, manifest: Manifest) -> int:
    return range_fingerprint(values, piece.name, piece.kind, manifest.tensors[piece.name].shape, piece.box, piece.start)


def header_problems(path: Path, file: DataFile, manifest: Manifest) -> list[str]:
    """List the contradictions between a file's safetensors header and the manifest."""
    try:
        header, begin = _read_header(path)
    except (OSError, ValueError, RecursionError, struct.error) as error:
        return [f"{path.name}: its safetensors header cannot be read: {error}"]
    return [f"{path.name}: {problem}" for problem in _disagreements(header, begin, file, manifest)]


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Read the safetensors header; return (entries by name, byte offset of the data)."""
    with path.open("rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"it claims {length:,} bytes")
        header = json.loads(handle.read(length))
    if not isinstance(header, dict):
        raise ValueError("it is no mapping of names to tensors")
    return header, 8 + length


def _disagreements(header: dict[str, Any], begin: int, file: DataFile, manifest: Manifest) -> Iterator[str]:
    expected = {}
    for piece in file.pieces:
        shape = manifest.tensors[piece.name].shape
        expected[entry_name(piece.kind, piece.name, shape, piece.box, piece.start)] = {
            "dtype": SAFETENSORS_NAMES[piece.dtype],
            "shape": [piece.numel],
            "data_offsets": [piece.offset - begin, piece.offset - begin + piece.num_bytes],
        }
    for name, entry in expected.items():
        if header.get(name) != entry:
            yield f"its safetensors header has {header.get(name)} for {name}, and the manifest {entry}"
    for name in header.keys() - expected.keys():
        yield f"its safetensors header has {name}, and the manifest does not"
    end = max((piece.offset + piece.num_bytes for piece in file.pieces), default=begin)
    if end != file.num_bytes:
        yield f"its tensors end at byte {end:,} of {file.num_bytes:,}"
