"""Write the error message of a rank that runs out of memory.

rank 5 (pp 1, dp 0, tp 1) is out of memory at 0F3, forward of microbatch 3 on chunk 0: tried to allocate 2.00 GiB.
  parameters     1.10 GB  predicted 1.10 GB
  ...
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import islice

import psutil
import torch

from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import OutOfMemoryError
from triaxis.engine.pipeline.actions import Action
from triaxis.engine.pipeline.lowering import Instruction
from triaxis.engine.step import Engine
from triaxis.engine.telemetry.observer import peak_memory_bytes
from triaxis.engine.telemetry.outlets.format import in_bytes
from triaxis.launch.rank.memory_errors import MemoryPlace, exhausted
from triaxis.models.predict.changes import savings
from triaxis.models.predict.rank_memory import Memory, predict

MOST_NAMED = 6


@contextmanager
def explaining_memory(
    config: Config, topology: Topology, snapshot: Callable[[], str] | None = None, engine: Engine | None = None
) -> Iterator[None]:
    """Turn a failed allocation inside the block into a readable error, and write a snapshot if possible.

    Raises:
        OutOfMemoryError: instead of the allocator's error.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if (place := exhausted(error)) is None:
            raise
        # Taken before the error propagates: the frames below still hold their tensors.
        written = None if snapshot is None else snapshot()
        raise explained(error, place, config, topology, engine, written) from error


def explained(
    error: BaseException,
    place: MemoryPlace,
    config: Config,
    topology: Topology,
    engine: Engine | None,
    snapshot: str | None = None,
) -> OutOfMemoryError:
    """Build an error that says why the rank ran out of memory.

    Args:
        error: the allocator's error.
        place: kind of memory that ran out: GPU, pinned or host.
        config: the run's configuration; `parallel.dp` is replaced by the topology's.
        engine: the rank's engine; None while it is being built.
        snapshot: a line about a snapshot; None: there is none.
    """
    sizes, at = topology.sizes, topology.coordinates
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"dp": sizes.dp})})
    assert parallel_sizes(config) == sizes
    is_gpu = topology.device.type == "cuda"
    nccl = is_gpu and not topology.staged
    predicted = predict(config, sizes, nccl=nccl).ranks[at.pp]
    where = "while the engine was built" if engine is None else _where(engine.executor.running)
    lines = [f"rank {topology.rank} ({at}) is out of memory {where}: {_wanted(error, place)}."]
    held = {} if engine is None else _held(engine)
    lines.append(f"  {'':<14}{'held':>14}{'predicted':>14}")
    for kind in fields(Memory):
        has = in_bytes(held[kind.name]) if kind.name in held else ""
        lines.append(f"  {kind.name:<14}{has:>14}{in_bytes(getattr(predicted, kind.name)):>14}")
    lines.append(
        f"The most that the rank has held so far: {in_bytes(peak_memory_bytes(topology.device))}. {_room(topology.device, place)}."
    )
    card = torch.cuda.mem_get_info(topology.device)[1] if is_gpu else None
    found = list(islice(savings(config, at.pp, nccl=nccl, most_bytes=card), MOST_NAMED))
    if found:
        lines.append("Any of these makes the prediction for this rank smaller:")
        lines += [
            f"  {saving}: {in_bytes(predicted.total - saving.memory.ranks[at.pp].total)} less" for saving in found
        ]
    else:
        lines.append(
            "No smaller layout is legal and fits with these ranks: use more of them, a shorter sequence or a smaller model."
        )
    if snapshot is not None:
        lines.append(snapshot)
    return OutOfMemoryError("\n".join(lines))


def _where(running: Instruction | None) -> str:
    if running is None:
        return "between two steps of the schedule"
    if isinstance(running, Action):
        return f"at {running}, {running.kind.words} of microbatch {running.microbatch} on chunk {running.chunk}"
    return "while messages were posted"


def _wanted(error: BaseException, place: MemoryPlace) -> str:
    """Describe the kind of memory that was requested, and the size if the allocator reports it."""
    text = str(error)
    size = ""
    if found := re.search(r"(?:allocate|alloc async|[cm]alloc|host alloc) (\d+) bytes", text):
        size = f"{in_bytes(int(found[1]))} of "
    elif found := re.search(r"Tried to allocate ([\d.]+ \wiB)", text):
        size = f"{found[1]} of "
    return f"an allocation of {size}{place} failed"


def _held(engine: Engine) -> dict[str, int]:
    """Count the bytes in tensors that live between steps, by kind: parameters, gradients, optimizer."""
    buffers = engine.buffers.buffers
    return {
        "parameters": sum(tensor.nbytes for buffer in buffers for tensor in buffer.weights),
        "gradients": sum(tensor.nbytes for buffer in buffers for tensor in buffer.grads),
        "optimizer": sum(tensor.nbytes for tensor in engine.optimizer.resident.tensors),
    }


def _room(device: torch.device, place: MemoryPlace) -> str:
    """Describe the size of the memory that ran out."""
    if place is MemoryPlace.GPU and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return f"The GPU has {in_bytes(total)}, of which {in_bytes(free)} are free"
    host = psutil.virtual_memory()
    return f"The host has {in_bytes(host.total)}, of which {in_bytes(host.available)} are free for all of its ranks"
