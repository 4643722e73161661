"""The policy for tensors that autograd saves: each is kept. `saving_hooks.py` recomputes some, or moves them to the host."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from triaxis.engine.activations.offload import HostMemory

Result = TypeVar("Result")

TensorObserver = Callable[[torch.Tensor], None]
"""Called with each tensor that holds device memory for a backward."""

ATTENTION = "attention"
"""The part of `SavedTensors.recomputed_inside`: its output is saved, its inner tensors are recomputed."""


def unobserved(tensor: torch.Tensor) -> None:
    """Observe nothing."""


class SavedTensors:
    """The policy for one rank's model chunks: every saved tensor is kept.

    Attributes:
        parts: names of the parts to recompute.
        host: takes the moved tensors; None: none is moved.
        is_replay: what runs is computed again in the backward.
    """

    parts: frozenset[str] = frozenset()
    host: HostMemory | None = None
    is_replay = False

    def run_layer(
        self,
        function: Callable[..., torch.Tensor],
        x: torch.Tensor,
        *,
        moves: bool = False,
        whole: bool = False,
        shared: Iterable[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Return `function(x)`, its saved tensors treated by this policy. Call layers in order, then `end_chunk`.

        Args:
            function: a layer, or several that are recomputed together.
            x: its input.
            moves: move its saved tensors to the host.
            whole: recompute all of it, so that only x is saved.
            shared: tensors that other layers save too; they are not moved.
        """
        assert not (moves or whole), "this policy keeps every tensor"
        return function(x)

    def end_chunk(self, output: torch.Tensor) -> torch.Tensor:
        """Return a chunk's output, after its last layer."""
        return output

    def recomputed(self, part: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a function of tensors with the same results; autograd saves a recipe of each if `part` is recomputed."""
        return function

    def recomputed_inside(self, part: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return the same function (tensors, *others); its inner saved tensors are recomputed if `part` is recomputed."""
        return function

    def makes_again(self, part: str) -> bool:
        """Return whether the part is recomputed of the layer that runs; where the layer is replayed as a whole, it is not."""
        return False

    def once(self, function: Callable[[], Result]) -> Result:
        """Return `function()`; where a whole layer is replayed, what it returned in the forward."""
        return function()
