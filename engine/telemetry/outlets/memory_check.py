"""Compares measured memory with the prediction, once per attempt, in runs on GPUs.

    step 1    2    3          the first steps allocate everything that a step needs
                 | one all-reduce (over the world, labelled "memory") exchanges each rank's peak
                 v
    memory after 2 steps: rank 3 (pp 1) has held .. of tensors at most, .. predicted; the allocator reserved ..; outside of it ..

The loop waits for this all-reduce between two steps. CPU runs have no such line, because torch does not count tensors in CPU
memory.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from triaxis.engine.comm.topology import Topology
from triaxis.engine.telemetry.outlets.format import gigabytes

AFTER_STEPS = 2
PURPOSE = "memory"


class Held(NamedTuple):
    """Memory of one rank, in bytes.

    Attributes:
        allocated: peak memory in tensors.
        reserved: peak memory that torch's allocator took from the GPU.
        in_use: GPU memory in use now by all processes, CUDA contexts and NCCL included.
        capacity: total GPU memory.
    """

    allocated: int
    reserved: int
    in_use: int
    capacity: int


def held_on_gpu(device: torch.device) -> Held:
    """Read the memory use of this process and its GPU."""
    free, capacity = torch.cuda.mem_get_info(device)
    return Held(
        torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device), capacity - free, capacity
    )


def comparison_line(compared: Mapping[str, int]) -> str:
    """Put a result of `MemoryCheck.on_step` into words."""
    held, expected, reserved, communicators, capacity = (
        gigabytes(compared[name])
        for name in ("allocated", "predicted_tensors", "reserved", "predicted_communicators", "capacity")
    )
    outside = gigabytes(compared["in_use"] - compared["reserved"])
    return (
        f"memory after {compared['after_steps']} steps: rank {compared['rank']} (pp {compared['pp']}) has held at most {held} of "
        f"tensors ({expected} predicted); the allocator reserved {reserved}; outside it, {outside} of the GPU are in use "
        f"({communicators} predicted for communicators); the GPU has {capacity}"
    )


class MemoryCheck:
    """Compares the ranks' memory with a prediction, after an attempt's second step. All ranks make the same calls.

    Args:
        predicted: a rank's predicted memory in bytes, as (tensors, communicators), by pipeline index.
        read: function () -> this rank's memory; None means `held_on_gpu`.
    """

    def __init__(
        self,
        topology: Topology,
        predicted: Sequence[tuple[int, int]],
        read: Callable[[], Held] | None = None,
    ) -> None:
        self._topology = topology
        self._predicted = predicted
        self._read = read or (lambda: held_on_gpu(topology.device))
        self._steps = 0

    def on_step(self) -> dict[str, int] | None:
        """Count a step. After the second step, return the memory of the rank with the highest tensor peak, on every rank.

        Returns:
            The fields of a JSON event, in bytes: those of `Held`, the number of steps completed in this attempt (`after_steps`),
            the rank and its pipeline index (`rank`, `pp`), its predicted memory in tensors, counted like `allocated`
            (`predicted_tensors`), and the estimate for its NCCL buffers (`predicted_communicators`). None after other steps.
        """
        self._steps += 1
        if self._steps != AFTER_STEPS:
            return None
        topology, width = self._topology, len(Held._fields)
        numbers = [0.0] * (width * topology.grid.world_size)
        numbers[width * topology.rank : width * (topology.rank + 1)] = map(float, self._read())
        numbers = topology.axis("world").sum_values(numbers, topology.device, PURPOSE)
        ranks = [
            Held(*(int(number) for number in numbers[width * rank : width * (rank + 1)]))
            for rank in range(topology.grid.world_size)
        ]
        fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].allocated)
        pp = topology.grid.coordinates(fullest).pp
        predicted = zip(("predicted_tensors", "predicted_communicators"), self._predicted[pp], strict=True)
        return {"after_steps": self._steps, "rank": fullest, "pp": pp} | ranks[fullest]._asdict() | dict(predicted)
