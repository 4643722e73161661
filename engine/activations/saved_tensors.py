"""The default policy for tensors that autograd saves: each is kept."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from triaxis.engine.activations.offload import HostMemory

Result = TypeVar("Result")

TensorObserver = Callable[[torch.Tensor], None]
"""Function that is called with each tensor that stays in device memory for a backward."""

ATTENTION = "attention"
"""Name of the part wrapped with `SavedTensors.recomputed_inside`: attention's output is saved, its inner tensors are recomputed."""


def unobserved(tensor: torch.Tensor) -> None:
    """Ignore the tensor. This is the observer in runs without memory accounting."""


class SavedTensors:
    """Policy that keeps every tensor that autograd saves for one rank's model chunks.

    A subclass (`SavingHooks`) instead recomputes tensors or moves them to the host.

    Attributes:
        parts: names of a layer's parts to recompute, such as `norm` and `attention`; empty here.
        host: host memory for moved tensors; None here.
    """

    parts: frozenset[str] = frozenset()
    host: HostMemory | None = None

    def run_layer(
        self,
        function: Callable[..., torch.Tensor],
        x: torch.Tensor,
        *,
        moves: bool = False,
        whole: bool = False,
        shared: Iterable[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Run `function(x)`, and keep the tensors that autograd saves. A subclass may recompute or move them.

        Call layers in order, then `end_chunk`.

        Args:
            function: a layer, or several that are recomputed together.
            x: the layer's input.
            moves: whether to move the layer's saved tensors to the host.
            whole: whether to save only x, and to run the whole function again in the backward.
            shared: tensors that other layers save too; they are not moved.
        """
        assert not (moves or whole), "this policy keeps every tensor"
        return function(x)

    def end_chunk(self, output: torch.Tensor) -> torch.Tensor:
        """Return `output`. Called after a chunk's last layer; a subclass can then free that layer's moved tensors."""
        return output

    def recomputed(self, part: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wrap `function`, a layer's part, without changing its result.

        If the policy recomputes this part, autograd saves the function and its inputs instead of the result.
        """
        return function

    def recomputed_inside(self, part: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wrap `function(tensors, *others)`, a layer's part, without changing its result.

        If the policy recomputes this part, autograd saves only `tensors`, and the backward runs the whole function again.
        """
        return function

    def makes_again(self, part: str) -> bool:
        """Whether the running layer will recompute `part`. False during the replay of a whole layer."""
        return False

    def once(self, function: Callable[[], Result]) -> Result:
        """Run `function` and return its result. The replay of a whole layer returns the forward's result instead."""
        return function()
