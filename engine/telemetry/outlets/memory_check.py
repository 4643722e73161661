"""Compares measured memory with the prediction, once per attempt, in runs on GPUs.

    step 1    2    3          the first steps allocate everything that a step needs
                 | one all-reduce (over the world, labelled "memory") exchanges each rank's peak
                 v
    memory after 2 steps: rank 3 (pp 1) has held .. of tensors at most, .. predicted; the allocator reserved ..; outside of it ..

The loop waits for this all-reduce between two steps. CPU runs have no such line, because torch does not count tensors in CPU
memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

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


@dataclass(frozen=True, slots=True)
class MemoryComparison:
    """Measured and predicted bytes on the rank with the highest tensor peak. Other attributes are as in `Held`.

    Attributes:
        after_steps: number of steps completed in this attempt.
        pp: the rank's pipeline index.
        predicted_tensors: predicted tensor memory, counted like `allocated`.
        predicted_communicators: estimated memory for the rank's NCCL buffers.
    """

    after_steps: int
    rank: int
    pp: int
    allocated: int
    reserved: int
    in_use: int
    capacity: int
    predicted_tensors: int
    predicted_communicators: int

    def __str__(self) -> str:
        held, expected, reserved, outside, communicators, capacity = map(
            gigabytes,
            (
                self.allocated,
                self.predicted_tensors,
                self.reserved,
                self.in_use - self.reserved,
                self.predicted_communicators,
                self.capacity,
            ),
        )
        return (
            f"memory after {self.after_steps} steps: rank {self.rank} (pp {self.pp}) has held at most {held} of tensors "
            f"({expected} predicted); the allocator reserved {reserved}; outside it, {outside} of the GPU are in use "
            f"({communicators} predicted for communicators); the GPU has {capacity}"
        )

    def to_record(self) -> dict[str, Any]:
        """Convert to the fields of a JSON event: each attribute under its own name."""
        return asdict(self)


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

    def on_step(self) -> MemoryComparison | None:
        """Count a step. After the second step, return the comparison on every rank, else None."""
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
        return MemoryComparison(self._steps, fullest, pp, *ranks[fullest], *self._predicted[pp])
