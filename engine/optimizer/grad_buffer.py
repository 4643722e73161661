"""One rank's flat parameters and main grads, reduced and gathered bucket by bucket while compute goes on.

A buffer (`param_layout.py`) has two flat tensors: parameters in the run's dtype, main grads in its accumulation dtype (or narrower,
`precision.gradients`). Parameters with an update rule of their own, such as router biases, are in the accumulation dtype and have
no main grads. Frozen parameters' gradients are computed and reduced like others, but nothing reads them. A step:

    start(m)          main grads are stale; each parameter expects m gradients per use, and the first overwrites.
    backward ...      each added gradient is counted (`grad_added`); a bucket's last one posts its reduce-scatter over
                      dp (experts: expert_dp), which runs under the rest of the backward.
    finish()          waits for the reduce-scatters, then all-reduces owned parts that are partial sums over a further axis.
    (optimizer)       writes the owned parameters.
    gather()          posts the all-gathers; `complete` waits for a bucket when the next forward needs it.

No flag marks the last microbatch: a bucket is ready when its count is complete. A wrong count at the end of the step is an error
that names the parameter.

Where ZeRO-2 or 3 cuts a buffer, a rank keeps only the owned parts and two slots of whole buckets. Main grads are then reduced after
each microbatch (`Slot`), and weights are gathered at their use, not after an update (`WeightSlots`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import REPLICA_GRADIENTS
from triaxis.engine.config.state_plan import MAIN_GRAD, NUM_SLOTS, WEIGHT, StateRow, state_rows
from triaxis.engine.config.training import PrecisionConfig
from triaxis.engine.kernels.weight_grad import add
from triaxis.engine.layout.gather_order import GatherOrder
from triaxis.engine.layout.param_layout import BucketLayout, BufferLayout
from triaxis.engine.layout.shard_spec import ReduceAxis
from triaxis.engine.numerics.precision import DTYPES, STORED_DTYPES
from triaxis.engine.tensor_parallel.parameter import ShardedParameter

OnGrad = Callable[[ShardedParameter], None]
"""Called with a parameter whose gradient was added, before its bucket is reduced."""


@dataclass
class Slot:
    """Scratch memory for the main grads of one bucket at a time, where a rank keeps only its own part of them (ZeRO-2).

    Attributes:
        grads: flat tensor of the longest of its buckets.
        sending: bucket whose reduce-scatter reads the slot; None: the slot is free.
    """

    grads: torch.Tensor
    sending: "Bucket | None" = None

    def free(self) -> None:
        """Wait for the bucket that was sent, and keep its sum."""
        if self.sending is not None:
            self.sending.keep_sum()
            self.sending = None


class WeightSlots:
    """Two places for the weights of the buckets in use, where a rank keeps only its own part of them (ZeRO-3).

    The first use of a bucket waits for its gather and posts the one of the bucket that follows. That gather overwrites a bucket
    whose last use was posted before, so the order of the streams keeps it safe.

    Args:
        buckets: the buffer's buckets, each with its slot's memory.
        slots: number of slots.
    """

    def __init__(self, buckets: "Sequence[Bucket]", slots: int) -> None:
        self._buckets = buckets
        self._numbers = {id(bucket): number for number, bucket in enumerate(buckets)}
        self._order = GatherOrder(len(buckets), slots)
        self._held: list[Bucket | None] = [None] * slots
        self._used: Bucket | None = None

    def use(self, bucket: "Bucket") -> None:
        """Wait until a bucket's weights are gathered; they stay complete until another bucket of the same buffer is used."""
        for number in self._order.use(self._numbers[id(bucket)]):
            gathered, slot = self._buckets[number], number % len(self._held)
            held, self._held[slot] = self._held[slot], gathered
            if held is not None:
                # A gather that nobody used may still write here.
                held.wait_for_gather()
            gathered.post_gather()
        bucket.wait_for_gather()
        if self._used is not None:
            self._used.is_complete = False
        bucket.is_complete, self._used = True, bucket

    def clear(self) -> None:
        """Drop the gathered weights, which an update has changed."""
        for bucket in self._buckets:
            bucket.wait_for_gather()
            bucket.is_complete = False
            bucket.version += 1
        self._order.clear()
        self._used = None


@dataclass
class Bucket:
    """A buffer range whose gradients are reduced in one call, and whose parameters are gathered in one.

    Gradients come in rounds, each of which ends with a reduce-scatter. A bucket with whole main grads has one round in a step.
    A bucket in a slot has one for each microbatch: it takes the slot at its first gradient, and adds the sum to its own part.

    Attributes:
        owned: (start, stop) in the buffer of the part that this data-parallel rank owns.
        owners: axis whose ranks own a part each.
        weights: weights of the bucket [stop - start], a part of the buffer's or of a slot.
        owned_weights: weights of the owned part: a part of `weights` unless there are slots.
        grads: main grads of the bucket [stop - start], a part of the buffer's or of the slot.
        owned_grads: main grads of the owned part, whole after `GradBuffers.finish`: a part of `grads` unless there is a slot.
        slot: scratch memory for main grads that the bucket shares with others; None: `grads` are its own.
        weight_slots: places for weights that the bucket shares with others; None: `weights` are its own.
        expected: number of gradients of each parameter in a round; only parameters that get gradients.
        missing: number of gradients that each parameter still expects in this round.
        num_missing: sum of `missing`; 0 between rounds.
        rounds_left: number of rounds of this step that have not begun.
        has_sum: whether `owned_grads` have a sum of this step; only with a slot.
        reducing, gathering: reduce-scatter and all-gather in flight, or None.
        is_complete: whether `weights` are complete now.
        stays: whether complete weights stay so until the next update: not in a slot.
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
        """Begin a step: main grads are stale, and each use of a parameter will add one gradient per microbatch."""
        self.rounds_left, per_round = (1, num_microbatches) if self.slot is None else (num_microbatches, 1)
        for parameter in self.expected:
            self.expected[parameter] = parameter.num_uses * per_round
        self.num_missing, self.has_sum, self.on_grad = 0, False, on_grad

    def overwrites(self, parameter: ShardedParameter) -> bool:
        """Return whether the parameter's next gradient replaces its main grad; called before each gradient is added.

        The first gradient of a round takes the slot.
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
        """Count one gradient, from one use of the parameter in one microbatch; a round's last one posts the reduce-scatter."""
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

    @property
    def own_part(self) -> torch.Tensor:
        """This rank's part of `grads`."""
        start, stop = self.owned
        return self.grads[start - self.layout.start : stop - self.layout.start]

    def keep_sum(self) -> None:
        """Wait for the reduce-scatter in flight, if there is one; with a slot, add its result to the owned main grads."""
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
        """Wait for the weights; in slots they are complete until another bucket of the buffer is used."""
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
        """Keep the owned part of `weights`, which were written from outside."""
        if self.weight_slots is not None:
            start, stop = self.owned
            self.owned_weights.copy_(self.weights[start - self.layout.start : stop - self.layout.start])


@dataclass
class FlatBuffer:
    """The tensors of one buffer.

    Attributes:
        weights: tensors that hold the weights: one [layout.numel]; or the owned parts [layout.numel / owners] and the slots.
        grads: tensors that hold the main grads, likewise; none for untrained parameters.
        reduce_axis: axis whose ranks own a part of each bucket.
        sum_axis: axis over which reduced gradients are still partial sums; None: they are whole.
        replica_index: this rank's index among those that hold the same parameters.
        is_updated: whether the optimizer changes the parameters: they are trained, and not frozen.
        weight_slots: places for the weights in use; None: all weights are here.
    """

    layout: BufferLayout
    weights: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor]
    buckets: list[Bucket]
    reduce_axis: Axis
    sum_axis: Axis | None
    replica_index: int
    is_updated: bool
    weight_slots: WeightSlots | None


class GradBuffers:
    """All flat buffers on one rank.

    A bucket joins many parameters, because one small collective per parameter would be bound by latency. A buffer has many buckets,
    so the first reductions run while most of the backward is still ahead. Gradients are counted, not hooked to a module's end, so
    microbatches, weights with two uses and deferred GEMMs need no special cases.

    Args:
        layouts: the frozen layout for this rank's parameters.
        parameters: the modules' parameters by name; they are bound to views into the flat tensors.
        reduce_axes: axes over which gradients are reduced, by name, as far as this rank has them.
        axes: axes over which replicas' gradients are summed, by name, as far as this rank has them.

    Attributes:
        dtype: the run's dtype, which trained parameters have.
    """

    def __init__(
        self,
        layouts: tuple[BufferLayout, ...],
        parameters: Mapping[str, ShardedParameter],
        precision: PrecisionConfig,
        device: torch.device,
        reduce_axes: Mapping[ReduceAxis, Axis],
        axes: Mapping[str, Axis],
    ) -> None:
        self.dtype = DTYPES[precision.dtype]
        self.device = device
        self.buffers: list[FlatBuffer] = []
        for layout in layouts:
            key, owners = layout.key, reduce_axes[layout.key.reduce_over]
            rows = state_rows(key, precision)
            weights = _tensors(layout, rows[WEIGHT], owners, device)
            grads = _tensors(layout, rows[MAIN_GRAD], owners, device) if MAIN_GRAD in rows else []
            buckets = _buckets(layout, owners, weights, grads)
            buffer = FlatBuffer(
                layout=layout,
                weights=weights,
                grads=grads,
                buckets=buckets,
                reduce_axis=owners,
                sum_axis=None if key.sum_over is None else axes[key.sum_over],
                replica_index=0 if key.replicas is None else axes[key.replicas].index,
                is_updated=key.is_updated,
                weight_slots=buckets[0].weight_slots,
            )
            self.buffers.append(buffer)
            for bucket in buffer.buckets:
                for entry in bucket.layout.entries:
                    parameter, shape = parameters[entry.record.name], entry.record.local_shape
                    place = slice(entry.start - bucket.layout.start, entry.stop - bucket.layout.start)
                    value = bucket.weights[place].view(shape)
                    if key.is_trained:
                        parameter.bind(value, bucket.grads[place].view(shape), bucket)
                        bucket.expected[parameter] = 0
                    else:
                        parameter.bind(value, None, bucket)

    @property
    def buckets(self) -> Iterator[Bucket]:
        """The buckets in all buffers."""
        return (bucket for buffer in self.buffers for bucket in buffer.buckets)

    def start(self, num_microbatches: int, on_grad: OnGrad | None = None) -> None:
        """Begin a step: main grads are stale, and each parameter expects `num_microbatches` gradients per use.

        `on_grad` is called in this step with each parameter whose gradient was added, before its bucket is reduced.
        """
        for bucket in self.buckets:
            bucket.start(num_microbatches, on_grad)

    def finish(self) -> None:
        """Wait for the reductions; afterwards the owned part of each bucket holds the whole gradient."""
        late = [name for bucket in self.buckets for name in _late(bucket)]
        assert not late, f"gradients are missing at the end of the step: {', '.join(late[:5])}"
        sums = []
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                bucket.keep_sum()
                # The second sum comes after the first, on [bucket / owners] elements in place of [bucket]. Replicas cut a buffer
                # alike (`param_layout.py`), so they own the same parts and post these calls in the same order.
                if buffer.sum_axis is not None and bucket.expected:
                    sums.append(buffer.sum_axis.all_reduce(bucket.owned_grads, REPLICA_GRADIENTS))
        for pending in sums:
            pending.wait()

    def gather(self, *, untrained: bool = False) -> None:
        """Post the all-gathers for updated parameters, in the order in which the forward needs them.

        With `untrained`, the others are gathered too: those that are frozen, and those that every rank changes alike. Weights in
        slots are dropped instead, and gathered at their next use.
        """
        for buffer in self.buffers:
            if buffer.weight_slots is not None:
                buffer.weight_slots.clear()
                continue
            if not (buffer.is_updated or untrained):
                continue
            # Buckets lie in backward order, the last layer first.
            for bucket in reversed(buffer.buckets):
                bucket.gather()

    def wait_all(self) -> None:
        """Complete every parameter that is not in a slot before something else reads it, such as a checkpoint."""
        for bucket in self.buckets:
            if bucket.weight_slots is None:
                bucket.complete()

    def write(
        self, parameters: Mapping[str, ShardedParameter], write: Callable[[list[ShardedParameter]], None]
    ) -> None:
        """Write values into parameters from outside; every rank calls it.

        Args:
            parameters: this rank's parameters by name.
            write: function that writes the values of some parameters, all at once or bucket by bucket.
        """
        at_once: list[ShardedParameter] = []
        for bucket in self.buckets:
            mine = [parameters[entry.record.name] for entry in bucket.layout.entries]
            if bucket.weight_slots is None:
                at_once += mine
                continue
            bucket.complete()
            write(mine)
            bucket.keep_weights()
        write(at_once)
        for buffer in self.buffers:
            if buffer.weight_slots is not None:
                buffer.weight_slots.clear()


def _tensors(layout: BufferLayout, row: StateRow, owners: Axis, device: torch.device) -> list[torch.Tensor]:
    """Allocate a kind of a buffer's state: one flat tensor, or the owned parts and the slots."""
    lengths = [layout.numel]
    if row.is_cut:
        lengths = [layout.numel // owners.size, *layout.slot_numels(NUM_SLOTS)]
    # Zeros for the padding: no gradient overwrites it, and the norm reads it with the owned parts.
    return [torch.zeros(numel, dtype=STORED_DTYPES[row.dtype], device=device) for numel in lengths]


def _buckets(
    layout: BufferLayout, owners: Axis, weights: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> list[Bucket]:
    """Build a buffer's buckets over its tensors."""
    slots = [Slot(scratch) for scratch in grads[1:]]
    buckets = []
    for number, bucket in enumerate(layout.buckets):
        owned = bucket.owned(owners.size, owners.index)
        places = [_places(bucket, owned, owners.size, tensors, number) for tensors in (weights, grads)]
        slot = slots[number % len(slots)] if slots else None
        buckets.append(Bucket(bucket, owned, owners, *places[0], *places[1], slot))
    if weights[1:]:
        in_slots = WeightSlots(buckets, len(weights[1:]))
        for each in buckets:
            each.weight_slots, each.is_complete, each.stays = in_slots, False, False
    return buckets


def _places(
    bucket: BucketLayout, owned: tuple[int, int], owners: int, tensors: Sequence[torch.Tensor], number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a bucket's whole elements [stop - start] and its owned ones, in a kind's tensors; empty if there are none."""
    if not tensors:
        return torch.empty(0), torch.empty(0)
    flat, *slots = tensors
    if not slots:
        return flat[bucket.start : bucket.stop], flat[slice(*owned)]
    return slots[number % len(slots)][: bucket.stop - bucket.start], flat[
        bucket.start // owners : bucket.stop // owners
    ]


def _late(bucket: Bucket) -> list[str]:
    """Name the parameters whose gradients of this step have not all come."""
    counts = bucket.expected if bucket.rounds_left else bucket.missing
    return [parameter.record.name for parameter, missing in counts.items() if missing]
