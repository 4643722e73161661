"""Write a snapshot of torch's GPU allocator when a rank runs out of memory.

Open the file in https://pytorch.org/memory_viz.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from triaxis.engine.run.directory import RunDirectory
from triaxis.launch.rank.join import Rank

HISTORY_ENTRIES = 100_000
"""Number of latest allocations and frees that `telemetry.memory_history` keeps: a few hundred MB of host memory at most."""


def remember_allocations(record: Callable[..., object] = torch.cuda.memory._record_memory_history) -> None:
    """Record from now on where memory was requested, and the latest allocations and frees in order."""
    record(max_entries=HISTORY_ENTRIES, stacks="python")


def write_snapshot(
    path: Path, *, has_history: bool, dump: Callable[[str], object] = torch.cuda.memory._dump_snapshot
) -> str:
    """Write a snapshot of this rank's GPU memory to `path`, and return a message with the path or with the failure.

    `has_history`: whether the snapshot names who allocated each block.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        dump(str(path))
    except (OSError, RuntimeError) as error:
        return f"A snapshot of its memory could not be written: {error}"
    said = f"Its memory, block by block: {path} (open it in https://pytorch.org/memory_viz)."
    if has_history:
        return said
    return f"{said} With telemetry.memory_history=true it also says who asked for each block."


def snapshot_writer(rank: Rank, directory: RunDirectory) -> Callable[[], str] | None:
    """Return the function that writes this rank's memory snapshot, with a history from now on if configured; None on the CPU."""
    if rank.topology.device.type != "cuda":
        return None
    has_history = rank.config.telemetry.memory_history
    if has_history:
        remember_allocations()
    return partial(write_snapshot, directory.memory_snapshot(rank.number), has_history=has_history)
