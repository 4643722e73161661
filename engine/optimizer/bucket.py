"""Reduces and gathers flat buffers by buckets, each in one call.

A bucket's last gradient posts its reduce-scatter. With replicas of the state (HSDP), `ReplicaSums` then sums the reduced part over
the replicas.

A bucket has its own memory, unless a rank keeps only its own part (ZeRO-2 and 3). Then buckets take turns in slots, which are large
enough for a whole bucket:

    `Slot`          main grads, reduced after each microbatch (ZeRO-2 and 3)
    `WeightSlots`   weights, gathered when they are used (ZeRO-3)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import REPLICA_GRADIENTS
from triaxis.engine.kernels.weight_grad import add
from triaxis.engine.layout.gather_order import GatherOrder
from triaxis.engine.layout.param_layout import BucketLayout
from triaxis.engine.tensor_parallel.parameter import ShardedParameter

OnGrad = Callable[[ShardedParameter], None]
"""Called with a parameter whose gradient was added, before its bucket is reduced."""


@dataclass
class Slot:
    """Scratch memory that holds one bucket's full main grads at a time, until they are reduce-scattered.

    Used with ZeRO-2 and 3, where a rank keeps only its own part of the main grads.

    Attributes:
        grads: flat tensor, as long as the longest bucket that uses the slot.
        sending: bucket whose reduce-scatter reads the slot; None: the slot is free.
    """

    grads: torch.Tensor
    sending: "Bucket | None" = None

    def free(self) -> None:
        """Free this slot. Wait for the reduce-scatter that reads it, and add the sums to the bucket's `owned_grads`."""
        if self.sending is not None:
            self.sending.keep_sum()
            self.sending = None


class WeightSlots:
    """Scratch slots for the gathered weights of the buckets in use (ZeRO-3).

    A bucket's first use waits for its gather, and posts the gather of the next bucket. That gather may overwrite a bucket that is
    no longer needed: the kernels that read the old bucket were posted earlier, so they run earlier. Embedding and head have
    another `WeightSlots`, with one slot; the first use of a layer posts the head's gather.

    Args:
        buckets: the buffer's buckets, each with its slot's memory.
        slots: number of slots.

    Attributes:
        ends: in the layers' `WeightSlots`, the `WeightSlots` for embedding and head; empty in all others.
    """

    def __init__(self, buckets: "Sequence[Bucket]", slots: int) -> None:
        self._buckets = buckets
        self._numbers = {id(bucket): number for number, bucket in enumerate(buckets)}
        self._order = GatherOrder(len(buckets), slots)
        self._held: list[Bucket | None] = [None] * slots
        self._used: Bucket | None = None
        self.ends: Sequence[WeightSlots] = ()

    def use(self, bucket: "Bucket") -> None:
        """Wait until a bucket's weights are gathered; they stay complete until another bucket of the same buffer is used."""
        for number in self._order.use(self._numbers[id(bucket)]):
            self._gather(number)
        bucket.wait_for_gather()
        if self._used is not None:
            self._used.is_complete = False
        bucket.is_complete, self._used = True, bucket
        for ends in self.ends:
            ends.gather_next()

    def gather_next(self) -> None:
        """Post the gather of the forward's next bucket into the only slot, if the slot's bucket has been used."""
        number = self._order.next_of_forward()
        if number is not None:
            self._gather(number)
            if self._used is not None:
                self._used.is_complete = False

    def _gather(self, number: int) -> None:
        gathered, slot = self._buckets[number], number % len(self._held)
        held, self._held[slot] = self._held[slot], gathered
        if held is not None:
            # A gather that nobody used may still write here.
            held.wait_for_gather()
        gathered.post_gather()

    def clear(self) -> None:
        """Drop the gathered weights, which an update has changed."""
        for bucket in self._buckets:
            bucket.wait_for_gather()
            bucket.is_complete = False
            bucket.version += 1
        self._order.clear()
        self._used = None


class ReplicaSums:
    """Sums the owned main grads over replicas of the state (HSDP).

    A bucket's sum is posted only after the next bucket's reduce-scatter is posted. Posted at once, the sum would make the backward
    wait for the bucket's own reduce-scatter.

    Args:
        axis: axis whose ranks own the same parts.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._sent: Bucket | None = None
        self._summing: list[Pending] = []

    def sent(self, bucket: "Bucket | None") -> None:
        """Post the replica sum for the previous call's bucket, and store `bucket` for the next call; None: no more follow."""
        before, self._sent = self._sent, bucket
        if before is not None:
            before.keep_sum()
            self._summing.append(self._axis.all_reduce(before.owned_grads, REPLICA_GRADIENTS))

    def finish(self) -> None:
        """Post the last bucket's sum over replicas, and wait for all buckets' sums over replicas."""
        self.sent(None)
        for pending in self._summing:
            pending.wait()
        self._summing.clear()


@dataclass
class Bucket:
    """A buffer range that is reduced (gradients) and gathered (parameters) in one call each.

    Gradients come in rounds, each of which ends with a reduce-scatter. A bucket with whole main grads has one round in a step.
    A bucket in a `slot` has one for each microbatch: it takes the slot at the round's first gradient, and later adds the reduced
    gradient to `owned_grads`.

    Attributes:
        owned: (start, stop) in the buffer of the part that this data-parallel rank owns.
        owners: axis whose ranks own one part of the bucket each.
        weights: weights of the bucket [stop - start], a view into the buffer's tensor or a slot.
        owned_weights: weights of the owned part, a view into `weights` unless there are slots.
        grads: main grads of the bucket [stop - start], a view into the buffer's tensor or the slot.
        owned_grads: main grads of the owned part, fully summed after `GradBuffers.finish`; a view into `grads` without a slot.
        slot: scratch memory for main grads that the bucket shares with others; None: `grads` are its own.
        weight_slots: scratch memory for weights that the bucket shares with others; None: `weights` are its own.
        replica_sums: object that sums `owned_grads` over replicas of the state (HSDP); None: there is only one replica.
        expected: number of gradients per round, for each parameter that gets gradients.
        missing: number of gradients that each parameter still expects in this round.
        num_missing: sum of `missing`; 0 between rounds.
        rounds_left: number of rounds of this step that have not begun.
        has_sum: whether `owned_grads` hold a sum from this step; used only with a slot.
        reducing, gathering: reduce-scatter and all-gather in flight, or None.
        is_complete: whether `weights` are complete now.
        stays: whether complete weights stay valid until the next update (in a slot they do not).
        version: number of changes of the weights.
    """

    layout: BucketLayout
    owned: tuple[int, int]
    owners: Axis
    weights: torch.Tensor
    owned_weights: torch.Tensor
    grads: torch.Tensor
    owned_grads: torch.Tensor
    slot: Slot | None = None
    weight_slots: WeightSlots | None = None
    replica_sums: ReplicaSums | None = None
    expected: dict[ShardedParameter, int] = field(default_factory=dict)
    missing: dict[ShardedParameter, int] = field(default_factory=dict)
    num_missing: int = 0
    rounds_left: int = 0
    has_sum: bool = False
    on_grad: OnGrad | None = None
    reducing: Pending | None = None
    gathering: Pending | None = None
    is_complete: bool = True
    stays: bool = True
    version: int = 0

    def start(self, num_microbatches: int, on_grad: OnGrad | None) -> None:
        """Begin a step. The parameters' first gradients overwrite the old main grads.

        In each microbatch, every layer that uses a parameter adds one gradient.
        """
        self.rounds_left, per_round = (1, num_microbatches) if self.slot is None else (num_microbatches, 1)
        for parameter in self.expected:
            self.expected[parameter] = parameter.num_uses * per_round
        self.num_missing, self.has_sum, self.on_grad = 0, False, on_grad

    def overwrites(self, parameter: ShardedParameter) -> bool:
        """Return whether the parameter's next gradient replaces its main grad. Called before each gradient is added.

        If the bucket has a `slot`, the first gradient since the last reduce-scatter takes the slot.
        """
        if self.num_missing == 0:
            self._begin_round(parameter)
        return self.missing[parameter] == self.expected[parameter]

    def _begin_round(self, parameter: ShardedParameter) -> None:
        assert self.rounds_left, f"{parameter.record.name}: a gradient more than microbatches x uses was added"
        self.rounds_left -= 1
        self.missing = dict(self.expected)
        self.num_missing = sum(self.missing.values())
        if self.slot is not None:
            self.slot.free()
            # No gradient overwrites padding, and the norm reads it with the owned parts. Another bucket may have written here.
            self.grads[self.layout.entries[-1].stop - self.layout.start :].zero_()

    def grad_added(self, parameter: ShardedParameter) -> None:
        """Count one gradient, from one use of the parameter in one microbatch.

        When the bucket's last expected gradient has come, post its reduce-scatter.
        """
        # Called before counting: the last gradient posts a reduce-scatter, which overwrites the owned main grads.
        if self.on_grad is not None:
            self.on_grad(parameter)
        missing = self.missing[parameter] - 1
        assert missing >= 0, (
            f"{parameter.record.name}: a gradient came before its bucket had the others of the microbatch"
        )
        self.missing[parameter] = missing
        self.num_missing -= 1
        if self.num_missing == 0:
            # [bucket] -> [bucket / owners], into this rank's part, without another buffer. Other parts keep this rank's own sums.
            self.reducing = self.owners.reduce_scatter(self.grads, "gradients", out=self.own_part)
            if self.slot is not None:
                self.slot.sending = self
            if self.replica_sums is not None and self.rounds_left == 0:
                self.replica_sums.sent(self)

    @property
    def own_part(self) -> torch.Tensor:
        """This rank's part of `grads`."""
        start, stop = self.owned
        return self.grads[start - self.layout.start : stop - self.layout.start]

    def keep_sum(self) -> None:
        """Wait for the reduce-scatter in flight, if any, so that `owned_grads` include its result.

        If the bucket has a scratch `slot`, add the result; else it is already in place.
        """
        if self.reducing is None:
            return
        self.reducing.wait()
        self.reducing = None
        if self.slot is not None:
            add(self.owned_grads, self.own_part, overwrite=not self.has_sum)
            self.has_sum = True

    def gather(self) -> None:
        """Post the all-gather for the updated parameters."""
        self.post_gather()
        self.version += 1
        self.is_complete = False

    def complete(self) -> None:
        """Wait until `weights` are gathered.

        With `weight_slots` (ZeRO-3), they stay complete until a layer needs another bucket of the buffer.
        """
        if self.weight_slots is None:
            self.wait_for_gather()
            self.is_complete = True
        else:
            self.weight_slots.use(self)

    def post_gather(self) -> None:
        """Post the all-gather of the owned parts into `weights`."""
        self.gathering = self.owners.all_gather(self.owned_weights, "parameters", out=self.weights)

    def wait_for_gather(self) -> None:
        """Wait for the all-gather in flight, if there is one."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def keep_weights(self) -> None:
        """Copy this rank's part of changed `weights` to `owned_weights`, which only ZeRO-3 stores apart."""
        if self.weight_slots is not None:
            start, stop = self.owned
            self.owned_weights.copy_(self.weights[start - self.layout.start : stop - self.layout.start])
