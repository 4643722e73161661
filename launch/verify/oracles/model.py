"""Define the interface of an oracle.

An oracle computes losses, gradients and updates under its own parameter names. Each `Pair` relates some of the
oracle's parameters to the Triaxis parameters with the same numbers.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.layout.shard_spec import ParamSpec
from triaxis.launch.verify.verdict.records import TensorKind


class Pair(Protocol):
    """Some of our parameters, and the oracle's parameters that hold the same numbers.

    `triaxis.models.interop.huggingface.weights.Exchange` is an implementation.
    """

    @property
    def ours(self) -> tuple[ParamSpec, ...]: ...
    @property
    def theirs(self) -> tuple[str, ...]: ...
    def to_theirs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...
    def to_ours(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...


class Oracle(Protocol):
    """A model and its optimizer in one process. Tensors are whole, in the run's dtype, on the CPU."""

    @property
    def pairs(self) -> Sequence[Pair]:
        """Pairs of Triaxis and oracle parameters; together they have all, in our model's forward order."""

    def parameter(self, name: str) -> torch.Tensor:
        """The weight that the next forward uses."""

    def begin_step(self) -> None:
        """Set the gradients to zero."""

    def token_losses(self, microbatch: MicroBatch) -> torch.Tensor:
        """Compute every label's loss [b, s] for autograd, masked labels included. Backward adds to the gradients."""

    def end_backward(self) -> None:
        """Finish the gradients after the last microbatch's backward."""

    def gradient(self, name: str) -> torch.Tensor:
        """Gradient summed so far."""

    def update(self) -> float:
        """Clip the gradients, run one optimizer step, and return the norm before clipping."""

    def state(self, kind: TensorKind, name: str) -> torch.Tensor:
        """Return a master or moment (`exp_avg`) after an update. The result has as many elements as the parameter."""
