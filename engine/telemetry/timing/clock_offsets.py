"""How far the clocks of the ranks are apart, from calls that the run has anyway: small all-reduces.

    rank 0    enters        leaves                     no rank leaves an all-reduce before all have entered it:
    rank 3          enters   leaves
                                                       entered(0) <= left(3) - offset(3)   and   entered(3) - offset(3) <= left(0)

So each round bounds a rank's offset from both sides, whatever the network did. Of many rounds the tightest bounds are kept; the
offset is their middle, and half of their distance is its error at most (not an estimate). On one machine that is the
time of one all-reduce, some tens of microseconds; between machines it grows with the latency.
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
    """This rank's clock at the moment that all ranks call zero, and by how much that may be off."""

    origin_seconds: float
    error_seconds: float


def measure_offset(
    world: Axis, device: torch.device, clock: Callable[[], float] = time.perf_counter, num_rounds: int = NUM_ROUNDS
) -> ClockOffset:
    """Compare this rank's clock with that of the axis's first member; every member calls it at the same point.

    Args:
        world: all ranks whose clocks are compared.
        clock: seconds, never going back.
        num_rounds: all-reduces; the first ones are slow.
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
