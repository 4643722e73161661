"""The pieces of a rank's parameters that an update changes at once, with their state on the device.

State that stays on the device is updated in one pass over all buckets. State in host memory comes a piece at a time
(`host_state.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from triaxis.engine.optimizer.state import OptimizerState
from triaxis.engine.optimizer.stretches import Run

if TYPE_CHECKING:  # the optimizer imports this
    from triaxis.engine.optimizer.distributed import OwnedBucket

Launch = Callable[[], object]
"""Elementwise update of some elements, by the numbers of the step."""

Launches = Callable[[OptimizerState, torch.Tensor, Sequence[Run]], Sequence[Launch]]
"""Function (state, main grads, runs) of a piece -> its launches; none if the update has another form."""

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs (destination, source)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an owned bucket, with all that its update reads and writes.

    Attributes:
        where: the piece's slice of the owned elements.
        state: the piece's state on the device.
        runs: slices with one `UpdateRule` each, counted from the piece's start.
        launches: elementwise updates of these runs.
        home: pairs (device tensor, host tensor) to copy; empty if the state stays on the device.
    """

    owned: "OwnedBucket"
    where: slice
    state: OptimizerState
    runs: Sequence[Run]
    launches: Sequence[Launch]
    home: Copies

    @property
    def grads(self) -> torch.Tensor:
        """This piece's main grads [n], a view into the bucket's owned main grads."""
        return self.owned.grads[self.where]


class OnDevice:
    """State that stays on the device.

    Args:
        trained: the buckets that updates change.
        runs_of: each bucket's runs: slices of elements with one update rule each.
        launches: makes the launches of a piece.

    Attributes:
        tensors, host_tensors: the state's tensors on the device and in host memory.
    """

    def __init__(self, trained: Sequence["OwnedBucket"], runs_of: Sequence[Sequence[Run]], launches: Launches) -> None:
        self.pieces = [
            Piece(owned, slice(None), owned.state, runs, launches(owned.state, owned.grads, runs), [])
            for owned, runs in zip(trained, runs_of, strict=True)
        ]
        self.tensors = [tensor for owned in trained for tensor in owned.state.beside.values()]
        self.host_tensors: list[torch.Tensor] = []

    def __iter__(self) -> Iterator[Sequence[Piece]]:
        yield self.pieces
