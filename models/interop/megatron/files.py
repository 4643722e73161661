"""Read a Megatron-Core `torch_dist` checkpoint in one process, chunk by chunk.

    checkpoints/
        latest_checkpointed_iteration.txt     100, or the word release (weights without a run)
        iter_0000100/
            metadata.json                     {"sharded_backend": "torch_dist", ..}
            common.pt                         torch.save: args, iteration, the optimizer's settings
            .metadata                         a pickle with every tensor's shape, and each chunk's place
            __0_0.distcp  __0_1.distcp ..     chunks, one after another, each written by torch.save

`foreign_pickle.py` reads all these pickles without running them. Objects stored next to the tensors (`_extra_state`, RNG state) are
never opened.

Peak memory is two copies of one chunk. Chunks are checked to lie inside their files before any tensor is allocated, so a damaged
file cannot request more memory than the files take on disk.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from triaxis.engine.checkpoint.format.boxes import box_shape, intersect, within
from triaxis.engine.errors import CheckpointError, shown
from triaxis.engine.layout.shard_spec import Box
from triaxis.engine.storage.json_text import parse_json
from triaxis.engine.storage.state_files import read_text
from triaxis.models.interop.megatron.foreign_pickle import Inert, Name, read_archive, read_pickle

TRACKER = "latest_checkpointed_iteration.txt"
_SIGNS = (TRACKER, "iter_[0-9]*", "metadata.json", "common.pt", ".metadata")
"""Folder entries that identify a Megatron-Core checkpoint, complete or not."""

_TRACKER_CHARACTERS = 64
"""Upper limit for the tracker file, which holds an iteration or the word `release`."""

_LARGEST_METADATA = 4 * 2**30
"""Size limit in bytes for `.metadata` and common.pt; those of a model with a trillion parameters are below 1 GiB."""

_DCP = "torch.distributed.checkpoint"
_METADATA_CLASSES: frozenset[Name] = frozenset(
    [
        *(
            (f"{_DCP}.metadata", name)
            for name in (
                "Metadata",
                "MetadataIndex",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        *((f"{_DCP}.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
        *((f"{_DCP}.planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
        ("pathlib", "PosixPath"),
    ]
)
_COMMON_CLASSES: frozenset[Name] = frozenset(
    [
        ("argparse", "Namespace"),
        ("types", "SimpleNamespace"),
        ("pathlib", "PosixPath"),
        ("signal", "Signals"),
        ("torch", "device"),
        ("numpy", "dtype"),
        ("numpy.core.multiarray", "scalar"),
        ("numpy._core.multiarray", "scalar"),
    ]
)
_OTHER_FORMATS = {
    "zarr": "the zarr backend, which Megatron-Core itself no longer reads",
    "torch_dcp": "the format torch_dcp (FSDP2)",
    "fsdp_dtensor": "the format fsdp_dtensor (Megatron FSDP)",
}
_SAVE_AGAIN = (
    "Let the Megatron job load it and save it as torch_dist: --ckpt-format torch_dist, or --ckpt-convert-format torch_dist "
    "--ckpt-convert-save DIR."
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, stored as `length` bytes at `offset` in `file`."""

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in the checkpoint, with the chunks in which it is stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class TorchDist:
    """An open `torch_dist` checkpoint.

    Attributes:
        folder: the iteration's folder, iter_0000100 or release.
        tensors: tensors by key.
        objects: keys whose values are not tensors; they are never read.
        common: content of common.pt; objects in it are replaced by `Inert` records.
    """

    folder: Path
    tensors: Mapping[str, Stored]
    objects: frozenset[str]
    common: Mapping[str, Any]

    @property
    def args(self) -> Mapping[str, Any]:
        """Megatron-LM's arguments by name, empty if the checkpoint has none."""
        args = self.common.get("args")
        return args.state if isinstance(args, Inert) and isinstance(args.state, dict) else {}

    def read(self, key: str, box: Box | None = None) -> torch.Tensor:
        """Read a tensor, or a box of it, in its saved dtype.

        Raises:
            CheckpointError: a file is missing, ends early or disagrees with `.metadata`; or chunks are missing.
        """
        stored = self.tensors[key]
        box = box if box is not None else tuple((0, size) for size in stored.shape)
        parts = [(chunk, common) for chunk in stored.chunks if (common := intersect(chunk.box, box)) is not None]
        filled, numel = sum(math.prod(box_shape(common)) for _, common in parts), math.prod(box_shape(box))
        if filled != numel:
            raise CheckpointError(
                f"{self.folder}: {key} is there only in part: {filled:,} of {numel:,} elements. Chunks were written by "
                "ranks whose files are missing, or the save did not end. Copy the whole folder, or take another iteration."
            )
        values = torch.empty(box_shape(box), dtype=stored.dtype)
        for chunk, common in parts:
            values[within(common, box)] = self._chunk(key, stored, chunk)[within(common, chunk.box)]
        return values

    def _chunk(self, key: str, stored: Stored, chunk: Chunk) -> torch.Tensor:
        path = self.folder / chunk.file
        try:
            with path.open("rb") as handle:
                handle.seek(chunk.offset)
                content = handle.read(chunk.length)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error.strerror}. It holds a part of {key}. Copy the whole folder: every rank of the "
                "Megatron job wrote files of its own."
            ) from None
        source = f"{path} (bytes {chunk.offset:,} to {chunk.offset + chunk.length:,}, {key})"
        values = read_archive(content, (), "", source)
        if not isinstance(values, torch.Tensor) or (tuple(values.shape), values.dtype) != (
            box_shape(chunk.box),
            stored.dtype,
        ):
            found = (
                f"{values.dtype} {list(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
            )
            raise CheckpointError(
                f"{source} holds {found} where .metadata says {stored.dtype} {list(box_shape(chunk.box))}. The files are of "
                "different saves. Copy the folder again, or take another iteration."
            )
        return values


def find_iteration(path: Path) -> Path:
    """Locate one iteration's folder.

    The tracker file in `path` names the folder. If there is no tracker file, `path` is the folder.

    Raises:
        CheckpointError: that folder does not exist, or the tracker file cannot be read.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder. Give the folder that Megatron's --save named.")
    tracker = path / TRACKER
    if not tracker.is_file():
        return path
    try:
        with tracker.open(errors="replace") as file:
            name = file.read(_TRACKER_CHARACTERS + 1).strip()
    except OSError as error:
        raise CheckpointError(
            f"{tracker} cannot be read: {error.strerror}. It names the newest iteration. Give the folder of an iteration."
        ) from None
    folder = path / (f"iter_{int(name):07d}" if name.isdecimal() else "release")
    if len(name) > _TRACKER_CHARACTERS or not folder.is_dir():
        there = (
            f"is longer than {_TRACKER_CHARACTERS} characters" if len(name) > _TRACKER_CHARACTERS else "is not there"
        )
        raise CheckpointError(
            f"{tracker} says {name[:40]!r}, and {folder.name[:40]} {there}. Give the folder of an iteration that is: "
            f"{', '.join(sorted(entry.name for entry in path.glob('iter_*'))) or 'none'}."
        )
    return folder


def is_megatron_checkpoint(path: Path) -> bool:
    """Whether a folder looks like a Megatron-Core checkpoint. `open_checkpoint` reports what is missing."""
    return any(any(path.glob(name)) for name in _SIGNS)


def open_checkpoint(path: Path) -> TorchDist:
    """Open a checkpoint without reading its tensors.

    Raises:
        CheckpointError: the folder is not a checkpoint, has another format, is incomplete, or has a pickle that could run code.
    """
    folder = find_iteration(path)
    _check_format(folder)
    tensors, objects = _read_metadata(folder)
    common = read_archive(_bytes(folder / "common.pt"), _COMMON_CLASSES, "megatron.", str(folder / "common.pt"))
    if not isinstance(common, dict):
        raise CheckpointError(f"{folder / 'common.pt'} holds no dict. Restore it from a copy.")
    return TorchDist(folder, tensors, objects, common)


def _check_format(folder: Path) -> None:
    config = folder / "metadata.json"
    if not config.exists():
        raise CheckpointError(f"{folder} {_what_it_is(folder)}")
    try:
        backend = str(parse_json(read_text(config))["sharded_backend"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{config} does not say how the checkpoint is stored: {type(error).__name__}: {error}. Restore it from a copy."
        ) from None
    if backend != "torch_dist":
        what = _OTHER_FORMATS.get(backend, f"the backend {shown(backend)}")
        raise CheckpointError(f"{folder} is stored by {what}; only torch_dist is read here. {_SAVE_AGAIN}")


def _what_it_is(folder: Path) -> str:
    if any(folder.glob("mp_rank_*")) or (folder / "model_optim_rng.pt").exists():
        return f"is a legacy checkpoint (mp_rank_00/model_optim_rng.pt), cut for one layout. {_SAVE_AGAIN}"
    if (folder / ".metadata").exists():
        return f"has no metadata.json: it is stored by torch.distributed.checkpoint alone, or incomplete. {_SAVE_AGAIN}"
    if iterations := sorted(entry.name for entry in folder.glob("iter_*")):
        return f"has no {TRACKER}. Give one of its iterations: {', '.join(iterations[-3:])}."
    return f"is no checkpoint of Megatron-Core: it has neither metadata.json nor {TRACKER}. Give the folder that --save named."


def _bytes(path: Path) -> bytes:
    try:
        if (size := path.stat().st_size) > _LARGEST_METADATA:
            raise CheckpointError(
                f"{path} has {size:,} bytes, and at most {_LARGEST_METADATA:,} are read: it would not fit into memory. Restore it "
                "from a copy."
            )
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}. Without it nothing says what the other files mean. Copy the whole "
            "folder, hidden files too."
        ) from None


def _read_metadata(folder: Path) -> tuple[dict[str, Stored], frozenset[str]]:
    path = folder / ".metadata"
    content = read_pickle(_bytes(path), _METADATA_CLASSES, "", str(path))
    try:
        places = {
            (index.get("fqn"), tuple(index.get("offset") or ())): info
            for index, info in content.get("storage_data").items()
        }
        tensors, objects = {}, set()
        for key, entry in content.get("state_dict_metadata").items():
            if entry.get("size") is None:
                objects.add(key)
            else:
                tensors[key] = _stored(key, entry, places)
        _check_lengths(folder, tensors)
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise CheckpointError(
            f"{path} does not describe tensors in the way of torch.distributed.checkpoint: {str(error)[:300]}. Restore it from a "
            "copy."
        ) from None
    return tensors, frozenset(objects)


def _check_lengths(folder: Path, tensors: Mapping[str, Stored]) -> None:
    """Raise ValueError if a chunk reaches past its file's end, or a file's chunks together exceed its size.

    Missing files are skipped.
    """
    together: dict[str, int] = {}
    for key, stored in tensors.items():
        for chunk in stored.chunks:
            path = folder / chunk.file
            if not path.exists():
                continue
            size = path.stat().st_size
            together[chunk.file] = together.get(chunk.file, 0) + chunk.length
            if chunk.offset + chunk.length > size or together[chunk.file] > size:
                raise ValueError(
                    f"{chunk.file} has {size:,} bytes, and chunks of {key} and others reach beyond them (a chunk of "
                    f"{shown(chunk.length)} bytes at {shown(chunk.offset)}): it was cut, or is of another save"
                )


def _whole_numbers(values: Any, what: str) -> tuple[int, ...]:
    """Convert a list or tuple of integers >= 0 to a tuple. All else raises ValueError, with the name `what`."""
    if not isinstance(values, tuple | list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{what} is {shown(values)}")
    return tuple(values)


def _stored(key: str, entry: Inert, places: Mapping[tuple[Any, tuple[int, ...]], Inert]) -> Stored:
    shape, dtype = _whole_numbers(entry.get("size"), f"the shape of {key}"), entry.get("properties").state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{key} has the dtype {shown(dtype)}")
    chunks = []
    for part in entry.get("chunks"):
        offsets, sizes = (
            _whole_numbers(part.get(name), f"{name} of a chunk of {key}") for name in ("offsets", "sizes")
        )
        place = places.get((key, offsets))
        if place is None:
            raise ValueError(f"no file holds the chunk of {key} at {offsets}")
        file = place.get("relative_path")
        if Path(file).name != file or "\0" in file or place.get("transform_descriptors"):
            raise ValueError(f"{key} is in {shown(file)} with {shown(place.get('transform_descriptors'))}")
        box = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
        if not all(0 <= low < high <= size for (low, high), size in zip(box, shape, strict=True)):
            raise ValueError(f"a chunk of {key} lies outside of its shape {shape}")
        at = (place.get("offset"), place.get("length"))
        offset, length = _whole_numbers(at, f"the place of a chunk of {key}")
        if (least := math.prod(sizes) * dtype.itemsize) > length:
            raise ValueError(f"a chunk of {key} needs {shown(least)} bytes and has {shown(length)}")
        chunks.append(Chunk(box, file, offset, length))
    return Stored(shape, dtype, tuple(chunks))
