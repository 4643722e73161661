"""The pieces of a rank's parameters that an update changes at once, with their state on the device.

State that stays on the device is updated in one pass over all buckets. State in host memory comes a piece at a time
(`host_state.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from triaxis.engine.optimizer.state import OptimizerState
from triaxis.engine.optimizer.stretches import Run, Stretch

if TYPE_CHECKING:  # the optimizer imports this
    from triaxis.engine.optimizer.distributed import OwnedBucket

Join = Callable[[Sequence[Run]], Sequence[Stretch]]
"""Function (runs) -> launches of the elementwise update; none if the update has another form."""

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs (destination, source)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an owned bucket, in whose elements an update runs.

    Attributes:
        where: the part's slice of the owned elements.
        state: the part's state on the device.
        runs: runs of elements under one rule, from the part's start.
        stretches: the same runs, joined into launches of the elementwise update.
        home: pairs (device tensor, host tensor) to copy; empty if the state stays on the device.
    """

    owned: "OwnedBucket"
    where: slice
    state: OptimizerState
    runs: Sequence[Run]
    stretches: Sequence[Stretch]
    home: Copies

    @property
    def grads(self) -> torch.Tensor:
        """The part's main grads."""
        return self.owned.grads[self.where]


class OnDevice:
    """State that stays on the device.

    Args:
        trained: the buckets that updates change.
        runs_of: each bucket's runs of elements.
        join: function that joins runs into launches.

    Attributes:
        tensors, host_tensors: the state's tensors on the device and in host memory.
    """

    def __init__(self, trained: Sequence["OwnedBucket"], runs_of: Sequence[Sequence[Run]], join: Join) -> None:
        self.pieces = [
            Piece(owned, slice(None), owned.state, runs, join(runs), [])
            for owned, runs in zip(trained, runs_of, strict=True)
        ]
        self.tensors = [tensor for owned in trained for tensor in owned.state.beside.values()]
        self.host_tensors: list[torch.Tensor] = []

    def __iter__(self) -> Iterator[Sequence[Piece]]:
        yield self.pieces
