"""Measures the offsets between the ranks' clocks with small all-reduces.

    rank 0    enters        leaves                     no rank leaves an all-reduce before all have entered it:
    rank 3          enters   leaves
                                                       entered(0) <= left(3) - offset(3)   and   entered(3) - offset(3) <= left(0)

entered(r) and left(r) are readings of rank r's own clock, which is ahead of rank 0's by offset(r). So each round bounds a rank's
offset from both sides, whatever the network did. The offset is the middle of the tightest bounds over many rounds. Its error is at
most half the distance of these bounds: some tens of microseconds on one machine, and more between machines.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from triaxis.engine.comm.collectives import Axis
from triaxis.engine.numerics.precision import AGREEMENT_DTYPE

PURPOSE = "clocks"
NUM_ROUNDS = 30


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """This rank's clock reading when rank 0 entered the first all-reduce, and the reading's largest error."""

    origin_seconds: float
    error_seconds: float


def measure_offset(
    world: Axis, device: torch.device, clock: Callable[[], float] = time.perf_counter, num_rounds: int = NUM_ROUNDS
) -> ClockOffset:
    """Compare this rank's clock with the first member's clock. Every member must call this function at the same point.

    Args:
        world: axis over all ranks whose clocks are compared.
        clock: function that returns seconds and never goes back.
        num_rounds: number of all-reduces; the first ones are slow.
    """
    moments = []
    for _ in range(num_rounds):
        entered = clock()
        world.barrier(device, PURPOSE)
        moments += [entered, clock()]
    mine = torch.tensor(moments, dtype=AGREEMENT_DTYPE, device=device)
    own = mine.view(num_rounds, 2).tolist()
    first = world.broadcast(mine.clone(), 0, PURPOSE).wait().view(num_rounds, 2).tolist()
    if world.index == 0:
        return ClockOffset(first[0][0], 0.0)
    most = min(left - entered for (entered, _), (_, left) in zip(first, own, strict=True))
    least = max(entered - left for (entered, _), (_, left) in zip(own, first, strict=True))
    return ClockOffset(first[0][0] + (most + least) / 2, (most - least) / 2)
