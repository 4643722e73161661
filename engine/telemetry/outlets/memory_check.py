"""Measured memory compared with the predicted one, once in each attempt of a run on GPUs.

    step 1    2    3          the first steps allocate all that a step needs
                 | one all-reduce (world, "memory"): what each rank has held at most
                 v
    memory after 2 steps: rank 3 (pp 1) has held .. of tensors at most, .. predicted; the allocator reserved ..; outside of it ..

The loop waits for this one all-reduce, between two steps. On the CPU there is no such line: a process has no count of its tensors,
and its resident memory is Python and libraries for the most part.
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
        allocated: most that its tensors have held.
        reserved: most that torch's allocator has taken from the GPU.
        in_use: memory of the GPU that is taken now, by all processes, CUDA's contexts and NCCL.
        capacity: memory of the GPU.
    """

    allocated: int
    reserved: int
    in_use: int
    capacity: int


def held_on_gpu(device: torch.device) -> Held:
    """Read the memory of this process and of its GPU."""
    free, capacity = torch.cuda.mem_get_info(device)
    return Held(
        torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device), capacity - free, capacity
    )


@dataclass(frozen=True, slots=True)
class MemoryComparison:
    """Memory of the rank whose tensors have held the most, with the prediction for it; bytes.

    Attributes:
        after_steps: steps of this attempt that were made.
        pp: pipeline index of the rank.
        predicted_tensors: of the rank, as `allocated` counts.
        predicted_communicators: NCCL's buffers of the rank, an estimate.
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
            f"memory after {self.after_steps} steps: rank {self.rank} (pp {self.pp}) has held {held} of tensors at most, "
            f"{expected} predicted; the allocator reserved {reserved}; outside of it {outside} of its GPU are in use, "
            f"{communicators} predicted for communicators; the GPU has {capacity}"
        )

    def to_record(self) -> dict[str, Any]:
        """Return the fields of an event."""
        return asdict(self)


class MemoryCheck:
    """A comparison of the ranks' memory with a prediction, after the second step of an attempt; all ranks make the same calls.

    Args:
        predicted: (tensors, communicators) in bytes, by pipeline index.
        read: reads this rank's memory; None: of its GPU.
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
        """Count a step; after the second one, exchange what the ranks have held and return the comparison, on every rank."""
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
