"""Moves tensors between pipeline stages, for one rank.

Activations go over the axis `pp_forward`, their gradients over `pp_backward`. Each `Post` is one group call. A tensor for a stage
on the same rank uses neither axis.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from triaxis.engine.comm.backends import Message, Pending
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.pipeline.lowering import Direction, Post


@dataclass(frozen=True, slots=True)
class StageTensor:
    """The identity of a tensor between two stages.

    Attributes:
        stage: stage that receives the tensor.
    """

    direction: Direction
    stage: int
    microbatch: int


class Transport:
    """The tensors between stages that one rank sends and receives during one run of a program.

    An action asks for its input by `StageTensor`, whether a peer sent the input or this rank computed it. Each receive gets a new
    buffer, which serves as the stage's input until the backward. A sent tensor is held until its send has completed. Nothing waits
    for a send before the end of the run.

    Args:
        axes: the two pipeline axes by direction.
        shape, dtype, device: properties of every activation and of its gradient.
    """

    def __init__(
        self, axes: Mapping[Direction, Axis], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._axes = axes
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._arriving: dict[StageTensor, Pending] = {}
        self._leaving: dict[StageTensor, torch.Tensor] = {}
        self._sent: list[Pending] = []

    def post(self, post: Post) -> None:
        """Post the transfers as one group call, without waiting; release tensors whose sends have completed."""
        self._sent = [pending for pending in self._sent if not pending.completed]
        axis = self._axes[post.direction]
        messages = []
        keys = []
        for transfer in post.transfers:
            key = StageTensor(transfer.direction, transfer.stage, transfer.microbatch)
            keys.append(key)
            if transfer.source == axis.index:
                messages.append(Message("send", self._leaving.pop(key), transfer.destination))
            else:
                buffer = torch.empty(self._shape, dtype=self._dtype, device=self._device)
                messages.append(Message("recv", buffer, transfer.source))
        purpose = "activations" if post.direction == "forward" else "activation gradients"
        for key, message, pending in zip(keys, messages, axis.exchange(messages, purpose), strict=True):
            if message.kind == "recv":
                self._arriving[key] = pending
            else:
                self._sent.append(pending)

    def hand_over(self, key: StageTensor, tensor: torch.Tensor, *, local: bool) -> None:
        """Give a tensor to the stage in `key`.

        Args:
            local: whether that stage is on this rank; if not, a later post sends the tensor.
        """
        if local:
            self._arriving[key] = Pending(tensor)
        else:
            self._leaving[key] = tensor.contiguous()

    def take(self, key: StageTensor) -> torch.Tensor:
        """Wait for a tensor from a peer or from this rank, and return it."""
        return self._arriving.pop(key).wait()

    def finish(self) -> None:
        """Wait for the last sends. Assert that every tensor was sent or taken."""
        for pending in self._sent:
            pending.wait()
        self._sent = []
        assert not self._arriving and not self._leaving, (
            f"not taken {list(self._arriving)}, not sent {list(self._leaving)}"
        )
