"""Optimizer state in host memory (`optimizer.offload: cpu`), which passes through three places on the device.

The state is streamed piece by piece. Both copies overlap the update:

    to the device  | 1        | 2        | 3        |
    update         | 0        | 1        | 2        | ...
    to the host               | 0        | 1        | 2

The update itself stays on the device, so its bits do not depend on where the state is stored.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from triaxis.engine.config.quantities.state_plan import NUM_PLACES, PIECE_NUMEL
from triaxis.engine.device.copy_lane import CopyLane, Mark, lane_of
from triaxis.engine.device.pinned_memory import PinnedBuffer, Purpose, VectorSize, page_lock_of
from triaxis.engine.optimizer.pieces import Launches, Piece
from triaxis.engine.optimizer.stretches import Run

if TYPE_CHECKING:  # the optimizer imports this
    from triaxis.engine.optimizer.distributed import OwnedBucket

PURPOSE = Purpose("the optimizer's state", "keep it on the GPUs (optimizer.offload=none)")


class InHostMemory:
    """State in host memory, streamed through the device.

    Args:
        trained: the buckets that updates change.
        runs_of: each bucket's runs: slices of elements with one update rule each.
        launches: makes the launches of a piece.
        device: device of the parameters.

    Attributes:
        to_device, to_host: copy lanes, one for each direction.
        tensors: scratch tensors on the device, which pieces use in turn.
        host_tensors: the state in host memory.
    """

    def __init__(
        self,
        trained: Sequence["OwnedBucket"],
        runs_of: Sequence[Sequence[Run]],
        launches: Launches,
        device: torch.device,
    ) -> None:
        self.to_device: CopyLane = lane_of(device)
        self.to_host: CopyLane = lane_of(device)
        cut = [
            (owned, start, min(start + PIECE_NUMEL, len(owned.grads)), runs)
            for owned, runs in zip(trained, runs_of, strict=True)
            for start in range(0, len(owned.grads), PIECE_NUMEL)
        ]
        longest = max((stop - start for _, start, stop, _ in cut), default=0)
        dtypes = {kind: each.dtype for owned in trained for kind, each in owned.state.beside.items()}
        places = [
            {kind: torch.empty(longest, dtype=dtype, device=device) for kind, dtype in dtypes.items()}
            for _ in range(min(NUM_PLACES, len(cut)))
        ]
        self.tensors = [tensor for place in places for tensor in place.values()]
        self.host_tensors = [tensor for owned in trained for tensor in owned.state.beside.values()]
        self.pieces = []
        for number, (owned, start, stop, runs) in enumerate(cut):
            place = {kind: tensor[: stop - start] for kind, tensor in places[number % NUM_PLACES].items()}
            where, inside = slice(start, stop), _inside(runs, start, stop)
            state = owned.state.piece(where, place)
            self.pieces.append(
                Piece(
                    owned,
                    where,
                    state,
                    inside,
                    launches(state, owned.grads[where], inside),
                    [(place[kind], kept[start:stop]) for kind, kept in owned.state.beside.items()],
                )
            )

    @classmethod
    def allocate(cls, sizes: Sequence[VectorSize], device: torch.device) -> Sequence[torch.Tensor]:
        """Return vectors in host memory, page-locked for copies to `device`.

        Raises:
            OutOfMemoryError: the host cannot allocate or page-lock the memory.
        """
        # Never closed, because unlocking after a failure might wait for ever.
        return PinnedBuffer(sizes, page_lock_of(device), PURPOSE).vectors

    def __iter__(self) -> Iterator[Sequence[Piece]]:
        arrivals: list[Mark] = []
        departures: list[Mark] = []
        for number, piece in enumerate(self.pieces):
            for coming in self.pieces[len(arrivals) : number + 2]:
                if len(arrivals) >= NUM_PLACES:
                    self.to_host.wait(departures[len(arrivals) - NUM_PLACES])
                arrivals.append(self.to_device.post(coming.home))
            self.to_device.wait(arrivals[number])
            yield [piece]
            departures.append(self.to_host.post([(kept, place) for place, kept in piece.home]))
        # Whoever reads the state next is posted after these copies.
        for mark in departures[-NUM_PLACES:]:
            self.to_host.wait(mark)


def _inside(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """Cut runs (slice, update rule) to elements `start` to `stop`. The returned slices count from `start`."""
    cut = [(slice(max(where.start, start) - start, min(where.stop, stop) - start), rule) for where, rule in runs]
    return [(where, rule) for where, rule in cut if where.start < where.stop]
