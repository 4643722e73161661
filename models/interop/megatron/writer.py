"""Write checkpoints in Megatron-Core's `torch_dist` format, chunk by chunk.

`files.py` describes the format. `.metadata` pickles torch.distributed.checkpoint's own records, as Megatron-Core expects. One
process writes, and holds one chunk at a time.
"""

import argparse
import json
import pickle
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from triaxis.engine.errors import CheckpointError
from triaxis.engine.storage.files import sync, sync_folder, write_atomically
from triaxis.models.interop.megatron.files import TRACKER

FILE_BYTES = 2**30
"""File size at which a new chunk file is started."""


@dataclass(frozen=True, slots=True)
class OutgoingChunk:
    """A chunk to write, at `offsets` in the tensor `key`. `shape` is the tensor's full shape."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: torch.Tensor


def write_checkpoint(
    directory: Path,
    iteration: int | None,
    chunks: Iterable[OutgoingChunk],
    empty_objects: Iterable[str],
    common: Mapping[str, Any],
    args: Mapping[str, Any],
) -> Path:
    """Write `directory`/iter_<number>/ or `directory`/release/ completely or not at all.

    Then the tracker file names the iteration. Returns the path of the iteration's folder.

    Args:
        directory: parent folder; created if missing.
        iteration: iteration number; None for weights without a run.
        chunks: stream of chunks that cover every element of every tensor exactly once.
        empty_objects: keys that a Megatron-LM model looks up, with empty values (`_extra_state` without fp8).
        common: content of common.pt, without args.
        args: Megatron-LM's arguments, for common.pt.

    Raises:
        CheckpointError: the iteration already exists, the disk is full, or the folder is not writable. No partial files remain.
    """
    folder = directory / ("release" if iteration is None else f"iter_{iteration:07d}")
    if folder.exists():
        raise CheckpointError(f"{folder} already exists. Give another folder, or remove it.")
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_atomically(partial / ".metadata", [pickle.dumps(_write_chunks(partial, chunks, empty_objects))])
        with (partial / "common.pt").open("wb") as handle:
            torch.save({**common, "args": argparse.Namespace(**args)}, handle)
            handle.flush()
            sync(handle.fileno())
        versions = {"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
        text = json.dumps({"sharded_backend": "torch_dist", **versions})
        write_atomically(partial / "metadata.json", [text.encode()])
        partial.rename(folder)
        sync_folder(directory)
        write_atomically(directory / TRACKER, [("release" if iteration is None else str(iteration)).encode()])
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)  # if only the tracker file could not be written
        raise CheckpointError(
            f"{folder} could not be written: {error}. No part of it was kept. Make room or fix the permissions, and give the "
            "command again."
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _write_chunks(folder: Path, chunks: Iterable[OutgoingChunk], empty_objects: Iterable[str]) -> Any:
    """Write the chunk files, and return torch's metadata record for them."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, Any] = {}
    places: dict[Any, Any] = {}

    def items() -> Iterator[tuple[Any, Any]]:
        for chunk in chunks:
            size, sizes, offsets = (torch.Size(dims) for dims in (chunk.shape, chunk.values.shape, chunk.offsets))
            properties = TensorProperties(dtype=chunk.values.dtype)
            entry = tensors.setdefault(chunk.key, TensorStorageMetadata(properties, size, []))
            entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
            # Saving a view would save its whole storage.
            yield MetadataIndex(chunk.key, offsets, len(entry.chunks) - 1), chunk.values.contiguous().clone()
        for key in empty_objects:
            tensors[key] = BytesStorageMetadata()
            yield MetadataIndex(key), [None]

    stream, number = items(), 0
    item = next(stream, None)
    while item is not None:
        path = folder / f"__0_{number}.distcp"
        with path.open("xb") as handle:
            while item is not None and handle.tell() < FILE_BYTES:
                index, content = item
                start = handle.tell()
                torch.save(content, handle)
                places[index] = _StorageInfo(path.name, start, handle.tell() - start)
                item = next(stream, None)
            handle.flush()
            sync(handle.fileno())
        number += 1
    return Metadata(state_dict_metadata=tensors, storage_data=places)
