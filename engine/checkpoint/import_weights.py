"""Writes and reads checkpoints tensor by tensor, in one process and without a run.

Shards in memory are written as a file once they hold `FILE_BYTES`, so memory stays below that plus one shard.
"""

import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from triaxis.engine.checkpoint.directory import Candidate, CheckpointDirectory
from triaxis.engine.checkpoint.format.manifest import (
    FORMAT_VERSION,
    Ancestor,
    DataFile,
    Kind,
    Manifest,
    TensorInfo,
    TrainingState,
    read_manifest,
    write_manifest,
)
from triaxis.engine.checkpoint.format.store import TORCH_DTYPES, Shard, fingerprints, load, write_file
from triaxis.engine.checkpoint.inspect.weights import WhichWeights, kind_to_read
from triaxis.engine.checkpoint.lock import holding
from triaxis.engine.errors import CheckpointError
from triaxis.engine.layout.shard_spec import Box
from triaxis.engine.program import triaxis

FILE_BYTES = 2**30
"""Size in bytes at which collected shards are written as one file."""


def whole(name: str, values: torch.Tensor, kind: Kind = "master") -> Shard:
    """Wrap a whole logical global tensor as one shard."""
    return Shard(
        name, kind, tuple(values.shape), tuple((0, size) for size in values.shape), 0, values.contiguous().view(-1)
    )


def write_checkpoint(
    directory: Path,
    shards: Iterable[Shard],
    state: TrainingState,
    *,
    config: Mapping[str, Any],
    source: str,
    lineage: Iterable[Ancestor] = (),
    has_moments: bool = False,
) -> Path:
    """Write `directory`/step_<number>/ from a stream of shards, and return that folder.

    Args:
        directory: checkpoint folder, created if missing; an existing checkpoint of the same step is replaced.
        shards: every element of every tensor, once per state kind (weights; a moment or the average, if included).
        state: the run's counters; `TrainingState.at_start()` for plain weights.
        config: known part of the resolved configuration, at least its `model` section.
        source: origin of the checkpoint, for people who read the manifest.
        lineage: ancestors of the checkpoint, oldest first.
        has_moments: whether the shards include moments, and the average if `config` has one, so that a run can resume.

    Raises:
        OSError: the folder cannot be written; nothing half-written is left.
        CheckpointError: the shards do not hold every element exactly once; nothing is left either.
        TriaxisError: a live run writes in the folder.
    """
    with holding(directory, "write into another folder"):
        return _write(CheckpointDirectory(directory), shards, state, config, source, lineage, has_moments=has_moments)


def _write(
    checkpoints: CheckpointDirectory,
    shards: Iterable[Shard],
    state: TrainingState,
    config: Mapping[str, Any],
    source: str,
    lineage: Iterable[Ancestor],
    *,
    has_moments: bool,
) -> Path:
    partial = checkpoints.partial(state.step, 0)
    # Remove only this one: a run sweeps its own.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        files: list[DataFile] = []
        tensors: dict[str, TensorInfo] = {}
        for number, batch in enumerate(_batches(shards)):
            files.append(write_file(partial / f"part_{number:05d}.safetensors", batch))
            tensors.update({shard.name: TensorInfo(shape=shard.shape) for shard in batch})
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            content="training" if has_moments else "weights",
            run=source,
            attempt=0,
            written_at=datetime.now(UTC).isoformat(timespec="seconds"),
            state=state,
            fingerprint=fingerprints(piece for file in files for piece in file.pieces),
            layout={},
            config=dict(config),
            lineage=tuple(lineage),
            tensors=tensors,
            files=tuple(files),
        )
        write_manifest(partial, manifest)
        read_manifest(partial)
        return checkpoints.commit(partial, state.step)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read_tensor(
    folder: Path, manifest: Manifest, name: str, kind: Kind = "master", box: Box | None = None
) -> torch.Tensor:
    """Read a tensor, or only the part inside `box`, in its saved dtype, on the CPU.

    Raises:
        CheckpointError: the tensor is missing or damaged.
    """
    info = manifest.tensors.get(name)
    dtypes = {piece.dtype for _, piece in manifest.pieces_by_tensor.get((name, kind), ())}
    if info is None or not dtypes:
        raise CheckpointError(
            f"{folder} has no {kind} of {name}. It holds {len(manifest.tensors)} tensors; they are listed by  "
            + triaxis(f"checkpoint inspect {shlex.quote(str(folder))} --tensors")
        )
    box = box if box is not None else tuple((0, size) for size in info.shape)
    values = torch.empty([stop - start for start, stop in box], dtype=TORCH_DTYPES[max(dtypes)])
    load(folder, manifest, [Shard(name, kind, info.shape, box, 0, values.view(-1))])
    return values


def read_weights(candidate: Candidate, name: str, which: WhichWeights) -> torch.Tensor:
    """Read one whole parameter, trained or averaged, in the saved dtype, on the CPU.

    Raises:
        CheckpointError: the parameter is missing or damaged.
    """
    manifest = candidate.manifest
    return read_tensor(candidate.folder, manifest, name, kind_to_read(manifest, name, which))


def _batches(shards: Iterable[Shard]) -> Iterator[list[Shard]]:
    batch: list[Shard] = []
    num_bytes = 0
    for shard in shards:
        batch.append(shard)
        num_bytes += shard.values.numel() * shard.values.element_size()
        if num_bytes >= FILE_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
