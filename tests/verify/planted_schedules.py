"""Bugs of schedules with deferred weight gradients, planted in ranks under verification (see `planted.py`)."""

from typing import Any

import torch

from tests.parity.cases import Case
from tests.verify.bug import Bug, anything
from triaxis.engine.comm.backends import Pending
from triaxis.engine.pipeline.actions import Action
from triaxis.engine.pipeline.executor import _Run
from triaxis.engine.pipeline.p2p import StageTensor, Transport
from triaxis.engine.tensor_parallel.mappings import TensorParallelRegion


def weight_gradients_take_the_operands_of_the_latest_microbatch() -> None:
    backward = _Run.backward

    def late_binding(self: Any, action: Action) -> None:
        backward(self, action)
        latest = self.begun[action.chunk, action.microbatch]._deferred
        for work in self.begun.values():
            work._deferred = list(latest)

    _Run.backward = late_binding  # type: ignore[method-assign]


def gradients_that_are_gathered_again_are_this_ranks_own() -> None:
    leave = TensorParallelRegion.leave_backward

    def own(self: TensorParallelRegion, grad: torch.Tensor, purpose: str) -> Pending:
        if not purpose.endswith("regather"):
            return leave(self, grad, purpose)
        return Pending(torch.cat([grad] * self.axis.size))

    TensorParallelRegion.leave_backward = own  # type: ignore[method-assign]


def the_turn_of_a_v_hands_on_the_first_microbatch() -> None:
    hand_over = Transport.hand_over

    def first(self: Any, key: StageTensor, tensor: torch.Tensor, *, local: bool) -> None:
        if local and key.direction == "backward":
            self.first = tensor = getattr(self, "first", tensor)
        hand_over(self, key, tensor, local=local)

    Transport.hand_over = first  # type: ignore[method-assign]


def is_row_parallel(name: str) -> bool:
    return "proj" in name or "down" in name


ZB = Case("llama", tp=2, pp=2, sequence_parallel=True, schedule="zb_h1", num_layers=4, global_batch_size=6)

ZBV = Case("llama", pp=2, vpp=2, schedule="zbv", num_layers=4, global_batch_size=4)

BUGS = (
    Bug(
        the_turn_of_a_v_hands_on_the_first_microbatch,
        ZBV,
        "gradient",
        anything,
        "pp",
        "vanishes with pp=1",
    ),
    Bug(
        weight_gradients_take_the_operands_of_the_latest_microbatch,
        ZB,
        "gradient",
        anything,
        "pp",
        "vanishes with pp=1",
    ),
    Bug(
        gradients_that_are_gathered_again_are_this_ranks_own,
        ZB,
        "gradient",
        is_row_parallel,
        "tp",
        "vanishes with tp=1",
    ),
)
