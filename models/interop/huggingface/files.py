"""Read and write a Hugging Face folder's safetensors one tensor at a time.

    config.json
    model.safetensors                                   one file, or
    model-00001-of-00002.safetensors, ...               several, with
    model.safetensors.index.json                        {"weight_map": {tensor: file}}

Each tensor is written at its offset as soon as the tensor is ready, so no file is whole in memory. A new folder appears complete or
not at all.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from triaxis.engine.checkpoint.format.store import TORCH_DTYPES
from triaxis.engine.errors import CheckpointError
from triaxis.engine.storage.files import sync, sync_folder
from triaxis.engine.storage.json_text import parse_json
from triaxis.engine.storage.state_files import read_text

DTYPES: Mapping[str, torch.dtype] = {
    "BF16": TORCH_DTYPES["bfloat16"],
    "F16": TORCH_DTYPES["float16"],
    "F32": TORCH_DTYPES["float32"],
    "F64": TORCH_DTYPES["float64"],
}
"""safetensors dtype name -> torch dtype, for supported weight dtypes."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

SHARD_BYTES = 5 * 10**9
"""Maximum file size in an export, unless one tensor is larger; transformers' default."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor's name, shape, and dtype as safetensors spells it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * DTYPES[self.dtype].itemsize


class WeightFiles:
    """All tensors in a folder's safetensors files.

    Opening reads only the files' headers.

    Attributes:
        tensors: shape and dtype of each tensor, by its name.

    Raises:
        CheckpointError: the folder has no safetensors (pickles are never opened), a file is missing or damaged, or a file lacks a
            tensor that the index says it has.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handles: dict[str, Any] = {}
        self._files: dict[str, str] = {}
        self.tensors: dict[str, TensorPlan] = {}
        expected = _file_of_each_tensor(folder)
        for file in sorted(set(expected.values())) or [SINGLE]:
            self._read_header(file)
        if lacking := [name for name, file in expected.items() if self._files.get(name) != file]:
            raise CheckpointError(
                f"{folder / INDEX} says that {lacking[0]} is in {expected[lacking[0]]}, which lacks it ({len(lacking)} tensors in "
                "all): files and index are of different models, and weights would be missing. Get the folder again, whole."
            )

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor to the CPU, in the file's dtype."""
        values: torch.Tensor = self._handles[self._files[name]].get_tensor(name)
        return values

    def _read_header(self, file: str) -> None:
        import safetensors

        try:
            handle = safetensors.safe_open(self.folder / file, framework="pt")
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.folder / file} is missing; the index names it. The model would lack its tensors. Get the folder again."
            ) from None
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.folder / file} is not a complete safetensors file: {error}. Its tensors cannot be trusted. Get it again."
            ) from None
        self._handles[file] = handle
        for name in handle.keys():  # noqa: SIM118 (it is no mapping)
            part = handle.get_slice(name)
            self._files[name] = file
            self.tensors[name] = TensorPlan(name, tuple(part.get_shape()), str(part.get_dtype()))


def write_weights(
    folder: Path,
    plans: Sequence[TensorPlan],
    tensors: Iterable[tuple[str, torch.Tensor]],
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write a stream of tensors to files, and return the files' paths.

    Several files get an index, whose path comes last. A file holds at most `shard_bytes`; a larger tensor gets a file of its own.

    Args:
        folder: existing folder without weights.
        plans: tensors to write, in order.
        tensors: stream of (name, tensor) in the order of `plans`; each is cast to its plan's dtype.
        shard_bytes: maximum tensor bytes in one file.

    Raises:
        OSError: the disk is full, or the folder is not writable.
    """
    shards = _cut(plans, shard_bytes)
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    stream = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, stream)
    if count > 1:
        index = {
            "metadata": {"total_size": sum(plan.num_bytes for plan in plans)},
            "weight_map": {plan.name: name for name, shard in zip(names, shards, strict=True) for plan in shard},
        }
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
        names.append(INDEX)
    return [folder / name for name in names]


def write_text(path: Path, text: str) -> None:
    """Write a small text file that must not exist yet, and flush it to disk."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a small binary file that must not exist yet, and flush it to disk. Creates its folder if missing."""
    path.parent.mkdir(exist_ok=True)
    with path.open("xb") as handle:
        handle.write(content)
        handle.flush()
        sync(handle.fileno())


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `path` at the end of the block.

    After an error, the folder is removed. A killed process's leftovers are removed when the same path is written next.

    Raises:
        CheckpointError: `path` exists and is not empty, or a file could not be read or written.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(
            f"{path} is there already and is not empty: what is in it would be lost, or mixed with another model. Give the path of "
            "a folder that does not exist yet, or remove this one."
        )
    partial = path.absolute().with_name(f"{path.absolute().name}.converting.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        sync_folder(partial)
        partial.rename(path)
        sync_folder(partial.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"{path} could not be written: {error}. Half a model is useless, so no part of it was kept. Make room or fix the "
            "permissions, and give the command again."
        ) from None


def _file_of_each_tensor(folder: Path) -> dict[str, str]:
    """Read {tensor name: file name} from the index; {} if there is a model.safetensors.

    Raises:
        CheckpointError: both are missing, or the index is damaged or names files outside the folder.
    """
    if (folder / SINGLE).is_file():
        return {}
    index = folder / INDEX
    if not index.is_file():
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickles:
            raise CheckpointError(
                f"{folder} has its weights as pickles ({', '.join(pickles[:3])}). Opening a pickle can run arbitrary code, so none "
                "is opened here. Use the model's safetensors. Or, if you trust its author, convert it: load it with transformers "
                "and save it again, which writes safetensors."
            )
        what = f"neither {SINGLE} nor {INDEX} is in it" if folder.is_dir() else "there is no such folder"
        raise CheckpointError(
            f"{folder}: {what}, so there are no weights to import. Give the folder of a Hugging Face model."
        )
    try:
        weight_map = parse_json(read_text(index))["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is not a weight index ({error}), so it is unknown which file holds which tensor. Get it again."
        ) from None
    if outside := [file for file in files.values() if Path(file).name != file or not file.endswith(".safetensors")]:
        raise CheckpointError(
            f"{index} names the file {outside[0]!r}: only safetensors files of the same folder are read. Get the folder again."
        )
    return files


def _cut(plans: Sequence[TensorPlan], shard_bytes: int) -> list[list[TensorPlan]]:
    shards: list[list[TensorPlan]] = [[]]
    filled = 0
    for plan in plans:
        if shards[-1] and filled + plan.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(plan)
        filled += plan.num_bytes
    return shards


def _write_file(path: Path, plans: Sequence[TensorPlan], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write one safetensors file, without gaps between tensors."""
    # Put wide dtypes first, so that every tensor starts at a multiple of its element size, as memory-mapping readers need.
    places: dict[str, int] = {}
    end = 0
    for plan in sorted(plans, key=lambda plan: -DTYPES[plan.dtype].itemsize):
        places[plan.name] = end
        end += plan.num_bytes
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for plan in plans:
        start = places[plan.name]
        header[plan.name] = {
            "dtype": plan.dtype,
            "shape": list(plan.shape),
            "data_offsets": [start, start + plan.num_bytes],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb", buffering=0) as handle:
        _write_at(handle.fileno(), struct.pack("<Q", len(text)) + text, 0)
        for plan in plans:
            name, values = next(tensors)
            assert (name, tuple(values.shape)) == (plan.name, plan.shape), f"{name} {values.shape} came for {plan}"
            raw = values.to(DTYPES[plan.dtype]).contiguous().view(-1).view(torch.uint8)
            _write_at(handle.fileno(), raw.numpy(), 8 + len(text) + places[name])
        sync(handle.fileno())


def _write_at(descriptor: int, content: Any, offset: int) -> None:
    """Write the whole buffer, in several calls if one call writes less."""
    left = memoryview(content)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written


def format_name(dtype: torch.dtype) -> str:
    """The safetensors name for a torch dtype."""
    return _NAMES[dtype]
