"""Small checkpoints for tests: random tensors, random ways to cut them, folders written from the cuts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path

import torch
from hypothesis import strategies as st

from triaxis.engine.checkpoint.directory import CheckpointDirectory
from triaxis.engine.checkpoint.format.boxes import within
from triaxis.engine.checkpoint.format.manifest import (
    FORMAT_VERSION,
    PIECE_BYTES,
    Kind,
    Manifest,
    TensorInfo,
    TrainingState,
    write_manifest,
)
from triaxis.engine.checkpoint.format.store import Shard, fingerprints, write_file
from triaxis.engine.config.values.optimizer_kinds import OPTIMIZERS
from triaxis.engine.layout.shard_spec import Box

Cut = tuple[Box, int, int]
"""A flat range [start, stop) of the row-major box."""

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)

dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Cut]:
    """The whole tensor as a grid of boxes (tensor parallelism), each cut into flat ranges (data parallelism), in any order."""
    edges = []
    for size in shape:
        inner = draw(st.sets(st.integers(1, size - 1), max_size=2)) if size > 1 else set()
        bounds = [0, *sorted(inner), size]
        edges.append(list(pairwise(bounds)))
    ranges: list[Cut] = []
    for box in product(*edges):
        numel = math.prod(stop - start for start, stop in box)
        inner = draw(st.sets(st.integers(1, numel - 1), max_size=3)) if numel > 1 else set()
        bounds = [0, *sorted(inner), numel]
        ranges += [(box, start, stop) for start, stop in pairwise(bounds)]
    return draw(st.permutations(ranges))


def shard(name: str, whole: torch.Tensor, cut: Cut, kind: Kind = "master") -> Shard:
    """What a rank holds of `whole` under a cut: a copy of its own."""
    box, start, stop = cut
    origin = tuple((0, size) for size in whole.shape)
    values = whole[within(box, origin)].contiguous().view(-1)[start:stop].clone()
    return Shard(name, kind, tuple(whole.shape), box, start, values)


def empty(name: str, whole: torch.Tensor, cut: Cut, kind: Kind = "master") -> Shard:
    """A place for that part, filled with a value that no test saves."""
    filled = shard(name, whole, cut, kind)
    filled.values.fill_(-77.0)
    return filled


def whole_of(shape: Sequence[int], shards: Iterable[Shard], dtype: torch.dtype) -> torch.Tensor:
    """The global tensor again, from its shards."""
    out = torch.full(tuple(shape), math.nan, dtype=dtype)
    for part in shards:
        box = out[within(part.box, tuple((0, size) for size in shape))]
        flat = box.flatten().clone()
        flat[part.start : part.stop] = part.values
        box.copy_(flat.view(box.shape))
    return out


def bits(tensor: torch.Tensor) -> list[int]:
    """Raw bytes, so that NaNs and the two zeros compare too."""
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Three parameters of a tiny model."""
    generator = torch.Generator().manual_seed(seed)
    names: dict[str, tuple[int, ...]] = {
        "embedding.word.weight": (11, 8),
        "layers.0.attention.kv.weight": (2, 2, 4, 8),
        "final_norm.weight": (8,),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in names.items()
    }


def training_shards(tensors: Mapping[str, torch.Tensor], ways: int = 1) -> list[list[Shard]]:
    """Weights and moments of a training checkpoint as `ways` ranks would hold them: flat parts of every tensor."""
    files: list[list[Shard]] = [[] for _ in range(ways)]
    for kind, scale in zip(OPTIMIZERS["adamw"].state_kinds, (1.0, 0.5, 0.25), strict=True):
        for name, values in tensors.items():
            box = tuple((0, size) for size in values.shape)
            edges = [values.numel() * rank // ways for rank in range(ways + 1)]
            for rank, (start, stop) in enumerate(pairwise(edges)):
                if start < stop:
                    files[rank].append(shard(name, values * scale, (box, start, stop), kind))
    return files


def write_folder(
    folder: Path,
    files: Sequence[Sequence[Shard]],
    *,
    step: int = 0,
    attempt: int = 0,
    piece_bytes: int = PIECE_BYTES,
    content: str = "training",
    **changed: object,
) -> Manifest:
    """A complete checkpoint in `folder`, one file per list of shards; `changed` are fields of the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = [
        write_file(folder / f"rank_{rank:05d}.safetensors", shards, piece_bytes) for rank, shards in enumerate(files)
    ]
    fields: dict[str, object] = {
        "format_version": FORMAT_VERSION,
        "content": content,
        "run": "test",
        "attempt": attempt,
        "written_at": "2026-01-01T00:00:00+00:00",
        "state": TrainingState.at_start().model_copy(update={"step": step}),
        "fingerprint": fingerprints(piece for entry in entries for piece in entry.pieces),
        "layout": {"tp": 1, "dp": len(files)},
        "config": {"model": {"num_layers": 1}},
        "lineage": (),
        "tensors": {part.name: TensorInfo(shape=part.shape) for shards in files for part in shards},
        "files": tuple(entries),
    }
    manifest = Manifest(**(fields | changed))
    write_manifest(folder, manifest)
    return manifest


def commit(directory: CheckpointDirectory, step: int, attempt: int = 0, seed: int = 0, ways: int = 2) -> Path:
    """A complete training checkpoint of `step` among the others of a directory."""
    partial = directory.partial(step, attempt)
    write_folder(partial, training_shards(model(seed), ways), step=step, attempt=attempt)
    return directory.commit(partial, step)
