"""Bugs in main grads and weights of which a rank keeps its part (ZeRO-2 and 3), or of which there are replicas (HSDP).

They are planted by name; see `planted.py`.
"""

from dataclasses import replace
from typing import Any

import torch

from tests.parity.cases import Case
from tests.verify.bug import Bug, anything
from triaxis.engine.optimizer.bucket import Bucket, ReplicaSums, Slot, WeightSlots
from triaxis.engine.optimizer.distributed import DistributedOptimizer
from triaxis.engine.optimizer.host_state import InHostMemory
from triaxis.models.gpt import chunk


def a_microbatchs_sum_is_added_twice() -> None:
    keep = Bucket.keep_sum

    def twice(self: Bucket) -> None:
        is_later = self.has_sum and self.reducing is not None
        keep(self)
        if is_later:
            self.owned_grads += self.own_part

    Bucket.keep_sum = twice  # type: ignore[method-assign]


def a_slot_is_reused_before_its_sum_is_kept() -> None:
    free = Slot.free

    def early(self: Slot) -> None:
        if self.sending is not None and self.sending.reducing is not None:
            self.sending.reducing.wait()
            self.grads.zero_()
        free(self)

    Slot.free = early  # type: ignore[method-assign]


def a_layer_keeps_its_weights_of_the_step_before() -> None:
    """The slots are not dropped after an update, so the first layers of the next forward are old."""
    clear = WeightSlots.clear

    def stale(self: WeightSlots) -> None:
        held, used = list(self._order._held), self._used
        clear(self)
        self._order._held, self._used = held, used

    WeightSlots.clear = stale  # type: ignore[method-assign]


def a_recomputed_layer_uses_what_its_slot_holds() -> None:
    use, run = WeightSlots.use, chunk._run
    is_again = [False]

    def stale(self: WeightSlots, bucket: Bucket) -> None:
        if is_again[0]:
            bucket.is_complete = True
        else:
            use(self, bucket)

    def ran(*arguments: Any, **named: Any) -> torch.Tensor:
        # A group that runs inside of a backward is recomputed.
        is_again[0] = torch._C._current_graph_task_id() != -1
        try:
            return run(*arguments, **named)
        finally:
            is_again[0] = False

    WeightSlots.use = stale  # type: ignore[method-assign]
    chunk._run = ran


def the_head_reads_the_embeddings_place() -> None:
    """The head counts as gathered into the place that the two share, and is not."""
    WeightSlots.gather_next = lambda self: self._order.next_of_forward()  # type: ignore[method-assign]


def a_moment_does_not_return_to_host_memory() -> None:
    """The last piece's first moment is updated in its place on the device alone."""
    init = InHostMemory.__init__

    def kept(self: InHostMemory, *args: Any) -> None:
        init(self, *args)
        last = self.pieces[-1]
        homes = zip(last.owned.state.beside, last.home, strict=True)
        copies = [(place, home.clone() if kind == "exp_avg" else home) for kind, (place, home) in homes]
        self.pieces[-1] = replace(last, home=copies)

    InHostMemory.__init__ = kept  # type: ignore[method-assign]


def an_owned_part_is_not_summed_over_replicas() -> None:
    """The step's first bucket to be reduced is lost."""
    sent = ReplicaSums.sent

    def late(self: ReplicaSums, bucket: Bucket | None) -> None:
        if self._sent is not None and not self._summing:
            self._sent = None
        sent(self, bucket)

    ReplicaSums.sent = late  # type: ignore[method-assign]


def gradient_norm_counts_replicas_of_the_state() -> None:
    square_sum = DistributedOptimizer.grad_square_sum

    def counted(self: DistributedOptimizer) -> torch.Tensor:
        for owned in self.owned:
            owned.buffer.is_first = owned.buffer.layout.key.replicas is None or owned.buffer.is_first
        return square_sum(self)

    DistributedOptimizer.grad_square_sum = counted  # type: ignore[method-assign]


def is_matrix(name: str) -> bool:
    return name.startswith("layers.") and name.endswith(".weight") and ".norm." not in name


HSDP = Case("gpt", dp=4, dp_replicas=2, num_layers=3)
CUT_GRADIENTS = Case("gpt", dp=2, zero=2, num_layers=3)

BUGS = (
    Bug(
        a_microbatchs_sum_is_added_twice,
        CUT_GRADIENTS,
        "gradient",
        is_matrix,
        "dp",
        "vanishes with dp=1, with zero=1",
    ),
    Bug(
        a_slot_is_reused_before_its_sum_is_kept,
        CUT_GRADIENTS,
        "gradient",
        is_matrix,
        "dp",
        "vanishes with dp=1, with zero=1",
    ),
    Bug(
        a_layer_keeps_its_weights_of_the_step_before,
        replace(CUT_GRADIENTS, zero=3),
        "parameter",
        is_matrix,
        "dp",
        "all-gather",
    ),
    Bug(
        a_recomputed_layer_uses_what_its_slot_holds,
        replace(CUT_GRADIENTS, zero=3, num_layers=4, recompute=("full", "uniform", 1)),
        "output",
        anything,
        "dp",
        "with zero=1",
    ),
    Bug(
        the_head_reads_the_embeddings_place,
        Case("gpt_untied", dp=4, zero=3, num_layers=3),
        "start",
        lambda name: name == "head.weight",
        "dp",
        "with zero=1",
    ),
    Bug(
        a_moment_does_not_return_to_host_memory,
        Case("gpt", dp=2, offload_state=True, num_layers=2),
        "exp_avg",
        anything,
        None,
        "vanishes with optimizer.offload=none",
    ),
    Bug(
        an_owned_part_is_not_summed_over_replicas,
        HSDP,
        "gradient",
        anything,
        "dp",
        "vanishes with dp=1, with dp_replicas=1",
    ),
    Bug(
        gradient_norm_counts_replicas_of_the_state,
        HSDP,
        "gradient norm",
        anything,
        "dp",
        "with dp_replicas=1",
    ),
)
