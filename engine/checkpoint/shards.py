"""Maps a live engine's state to a checkpoint and back.

    rank (tp, pp, dp)  owns  flat parts of its buckets  ->  segments of parameters  ->  shards, per kind

Each element is saved by exactly one rank: its data-parallel owner in the first replica. A rank loads every element that it owns.
The step's usual all-gather then gives the weights to the other data-parallel ranks.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Literal, TypeVar

import torch

from triaxis.engine.checkpoint.directory import Candidate
from triaxis.engine.checkpoint.format.fingerprint import range_fingerprint
from triaxis.engine.checkpoint.format.manifest import Kind, Manifest, TrainingState
from triaxis.engine.checkpoint.format.store import Shard, Values, load
from triaxis.engine.config.values.optimizer_kinds import EMA, MASTER
from triaxis.engine.errors import CheckpointError
from triaxis.engine.numerics.hashing import signed
from triaxis.engine.optimizer.distributed import DistributedOptimizer, OwnedBucket
from triaxis.engine.optimizer.loss_scale import ScaleState
from triaxis.engine.step import Engine

LoadWhat = Literal["all", "weights"]

Flat = TypeVar("Flat", bound=Values)


def shards(owned: OwnedBucket, flat: Flat, kind: Kind) -> Iterator[Shard[Flat]]:
    """Cut `flat`, the owned part of a bucket, into one shard per parameter segment."""
    origin = owned.bucket.owned[0]
    for segment in owned.segments:
        record, at = segment.record, segment.offset - origin
        values = flat[at : at + segment.stop - segment.start]
        yield Shard(record.name, kind, record.spec.shape, record.box, segment.start, values)


def saved_buckets(optimizer: DistributedOptimizer) -> list[OwnedBucket]:
    """Return the owned buckets that this rank saves. Only the first replica saves."""
    return [owned for owned in optimizer.owned if owned.buffer.is_first]


def having(buckets: Sequence[OwnedBucket], kind: Kind) -> Iterator[OwnedBucket]:
    """Yield the buckets that have state of this kind. Untrained parameters have no moments."""
    return (owned for owned in buckets if kind in owned.state.kinds)


def restore(engine: Engine, candidate: Candidate, what: LoadWhat) -> TrainingState:
    """Load this rank's state from a checkpoint of any layout. Every rank calls this.

    With `weights`, only the weights are loaded. With `all`, the moments and a saved average are loaded too. An average that was not
    saved starts as the loaded weights. A parameter that was frozen and is now trained starts with zero moments, and with its weight
    as average.

    Besides the state, memory holds two pieces of the files: one is copied while the next is read. If the state has another dtype,
    memory also holds one state kind, such as the weights, in the accumulation dtype. Only a rank that finds an error raises, so all
    ranks must agree before any continues. After an error the engine is partly filled.

    Returns:
        The state to continue from: with `all` the checkpoint's own, with `weights` that of a fresh start.

    Raises:
        CheckpointError: the checkpoint belongs to another model, is damaged, or has no moments.
    """
    manifest = candidate.manifest
    if what == "all" and manifest.content == "weights":
        raise CheckpointError(
            f"{candidate.folder} holds weights only, so there is no optimizer state to resume from. To start from these weights at "
            "step 0 with a fresh optimizer: checkpoint.load_what=weights"
        )
    optimizer = engine.optimizer
    kinds = loaded_kinds(engine, manifest, what)
    engine.buffers.wait_all()
    for kind in kinds:
        filled = [(owned, owned.state.read(kind)) for owned in having(optimizer.owned, kind)]
        wanted = [shard for owned, flat in filled for shard in shards(owned, flat, kind)]
        if kind != MASTER:
            # MASTER is the first kind, so its values are loaded by now.
            for owned, flat in filled:
                flat.copy_(owned.state.read(MASTER)) if kind == EMA else flat.zero_()
            wanted = [shard for shard in wanted if _has_moments(shard.name, manifest)]
        load(candidate.folder, manifest, wanted)
        for owned, flat in filled:
            owned.state.write({kind: flat})
    if EMA not in kinds:
        for owned in optimizer.owned:
            owned.state.restart_average()
    state = manifest.state if what == "all" else TrainingState.at_start()
    optimizer.restored(state.num_updates)
    scale = state.loss_scale
    engine.loss_scale.restore(None if scale is None else ScaleState(**scale.model_dump()))
    return state


def loaded_kinds(engine: Engine, manifest: Manifest, what: LoadWhat) -> list[Kind]:
    """Return the state kinds that `restore` reads. An average that was not saved is left out."""
    wanted = engine.optimizer.state_kinds if what == "all" else (MASTER,)
    return [kind for kind in wanted if kind != EMA or EMA in manifest.kinds]


def saved_numel(optimizer: DistributedOptimizer) -> int:
    """Return the number of elements that this rank saves per state kind, such as weights."""
    return sum(segment.stop - segment.start for owned in saved_buckets(optimizer) for segment in owned.segments)


def _has_moments(name: str, manifest: Manifest) -> bool:
    """Whether a parameter was trained in the checkpoint's run. True for a missing parameter, which `load` reports."""
    return name not in manifest.tensors or manifest.tensors[name].is_trained


def fingerprint(engine: Engine, leave_out: Collection[str] = ()) -> dict[Kind, int]:
    """Compute the live state's fingerprint over all ranks. Every rank calls this.

    Args:
        engine: engine that holds the state.
        leave_out: names of parameters to leave out of the sum.
    """
    kinds = engine.optimizer.state_kinds
    sums = torch.zeros(len(kinds), dtype=torch.int64, device=engine.topology.device)
    saved = saved_buckets(engine.optimizer)
    for number, kind in enumerate(kinds):
        for owned in having(saved, kind):
            for shard in shards(owned, owned.state.read(kind), kind):
                if shard.name in leave_out:
                    continue
                sums[number] += signed(
                    range_fingerprint(shard.values, shard.name, kind, shard.shape, shard.box, shard.start)
                )
    engine.topology.axis("world").all_reduce(sums, "fingerprint").wait()
    return {kind: int(value) % 2**64 for kind, value in zip(kinds, sums.tolist(), strict=True)}
