"""One rank's flat parameters and main grads, reduced and gathered bucket by bucket while compute goes on.

A buffer (`param_layout.py`) has two flat tensors: parameters in the run's dtype, main grads in its accumulation dtype (or narrower,
`precision.gradients`). Parameters with an update rule of their own, such as router biases, are in the accumulation dtype and have
no main grads. Frozen parameters' gradients are computed and reduced like others, but nothing reads them. A step:

    start(m)          each parameter expects m gradients per use; the first one overwrites the old main grads.
    backward ...      each added gradient is counted (`grad_added`); a bucket's last one posts its reduce-scatter over
                      dp (experts: expert_dp), which runs under the rest of the backward. With replicas of the state (HSDP) it
                      covers one replica's ranks, and an all-reduce of the owned part over the replicas follows.
    finish()          waits for these reductions, then all-reduces owned parts that are partial sums over `sum_axis`.
    (optimizer)       writes the owned parameters.
    gather()          posts the all-gathers; `complete` waits for a bucket when the next forward needs it.

No flag marks the last microbatch: a bucket is ready when its count is complete. A wrong count at the end of the step is an error
that names the parameter.

Where ZeRO-2 or 3 cuts a buffer, a rank keeps only the owned parts and two slots of whole buckets. Main grads are then reduced after
each microbatch (`Slot`), and weights are gathered at their use, not after an update (`WeightSlots`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import REPLICA_GRADIENTS
from triaxis.engine.config.quantities.state_plan import MAIN_GRAD, WEIGHT, StateRow, state_rows
from triaxis.engine.config.schema.training import PrecisionConfig
from triaxis.engine.layout.param_layout import BucketLayout, BufferLayout
from triaxis.engine.layout.shard_spec import ReduceAxis
from triaxis.engine.numerics.precision import DTYPES, STORED_DTYPES
from triaxis.engine.optimizer.bucket import Bucket, OnGrad, ReplicaSums, Slot, WeightSlots
from triaxis.engine.tensor_parallel.parameter import ShardedParameter


@dataclass
class FlatBuffer:
    """The tensors of one buffer.

    Attributes:
        weights: tensors that hold the weights. Whole: one [layout.numel]. Sharded: the owned parts [layout.numel / owners], then
            the scratch slots, one tensor each.
        grads: tensors that hold the main grads, likewise; none for untrained parameters.
        reduce_axis: axis whose ranks own a part of each bucket.
        sum_axis: axis over which reduced gradients are still partial sums, after the sum over replicas; None: they are whole.
        is_first: whether this rank is the first that owns these parts; only the first counts them in norms, and saves them.
        is_updated: whether the optimizer changes the parameters: they are trained, and not frozen.
        weight_slots: slots for the gathered weights in use; None: this rank holds all weights.
    """

    layout: BufferLayout
    weights: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor]
    buckets: list[Bucket]
    reduce_axis: Axis
    sum_axis: Axis | None
    is_first: bool
    is_updated: bool
    weight_slots: WeightSlots | None


class GradBuffers:
    """All flat buffers on one rank.

    A bucket joins many parameters, because one small collective per parameter would be bound by latency. A buffer has many buckets,
    so the first reductions run while most of the backward is still ahead. A bucket is ready when all its gradients are counted, not
    when a module's backward ends. So microbatches, weights with two uses and deferred GEMMs need no special cases.

    Args:
        layouts: the frozen layout for this rank's parameters.
        parameters: the modules' parameters by name; they are bound to views into the flat tensors.
        reduce_axes: for each value of `BufferKey.reduce_over`, the axis whose ranks own one part of the state each.
        axes: axes over which replicas' gradients are summed, by name; only those that this rank needs.
        state_replicas: axis whose ranks own the same parts (`parallel.dp_replicas`); None: there is one replica.

    Attributes:
        dtype: the run's dtype, which trained parameters have.
        is_watched: whether a function is called after each gradient of the current step.
    """

    def __init__(
        self,
        layouts: tuple[BufferLayout, ...],
        parameters: Mapping[str, ShardedParameter],
        precision: PrecisionConfig,
        device: torch.device,
        reduce_axes: Mapping[ReduceAxis, Axis],
        axes: Mapping[str, Axis],
        state_replicas: Axis | None = None,
    ) -> None:
        self.dtype = DTYPES[precision.dtype]
        self.is_watched = False
        self.device = device
        self.buffers: list[FlatBuffer] = []
        self._replica_sums = None if state_replicas is None else ReplicaSums(state_replicas)
        for layout in layouts:
            key, owners = layout.key, reduce_axes[layout.key.reduce_over]
            rows = state_rows(key, precision)
            weights = _tensors(layout, rows[WEIGHT], owners, device)
            grads = _tensors(layout, rows[MAIN_GRAD], owners, device) if MAIN_GRAD in rows else []
            buckets = _buckets(layout, owners, weights, grads, self._replica_sums)
            holders = (state_replicas, None if key.replicas is None else axes[key.replicas])
            buffer = FlatBuffer(
                layout=layout,
                weights=weights,
                grads=grads,
                buckets=buckets,
                reduce_axis=owners,
                sum_axis=None if key.sum_over is None else axes[key.sum_over],
                is_first=all(axis is None or axis.index == 0 for axis in holders),
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
        in_slots = [(each.layout.key, each.weight_slots) for each in self.buffers if each.weight_slots is not None]
        for key, slots in in_slots:
            if not key.of_ends:
                slots.ends = [ends for other, ends in in_slots if other.of_ends]

    @property
    def buckets(self) -> Iterator[Bucket]:
        """All buckets, buffer by buffer. In each buffer, the last layer's bucket comes first."""
        return (bucket for buffer in self.buffers for bucket in buffer.buckets)

    def start(self, num_microbatches: int, on_grad: OnGrad | None = None) -> None:
        """Begin a step. The parameters' first gradients overwrite the old main grads.

        Each parameter expects `num_microbatches` gradients from each layer that uses it.
        `on_grad` is called in this step with each parameter whose gradient was added, before its bucket is reduced.
        """
        self.is_watched = on_grad is not None
        for bucket in self.buckets:
            bucket.start(num_microbatches, on_grad)

    def finish(self) -> None:
        """Wait for the reductions; afterwards the owned part of each bucket holds the whole gradient."""
        late = [name for bucket in self.buckets for name in _late(bucket)]
        assert not late, f"gradients are missing at the end of the step: {', '.join(late[:5])}"
        if self._replica_sums is not None:
            self._replica_sums.finish()
        sums = []
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                bucket.keep_sum()
                # This sum is the last, on [bucket / owners] elements in place of [bucket]. Replicas cut a buffer alike
                # (`param_layout.py`), so they own the same parts and post these calls in the same order.
                if buffer.sum_axis is not None and bucket.expected:
                    sums.append(buffer.sum_axis.all_reduce(bucket.owned_grads, REPLICA_GRADIENTS))
        for pending in sums:
            pending.wait()

    def gather(self, *, untrained: bool = False) -> None:
        """Post the all-gathers for updated parameters, in the order in which the forward needs them.

        With `untrained`, parameters that the optimizer does not change are gathered too. For sharded weights (ZeRO-3), nothing is
        posted: old gathered copies are dropped, and each bucket is gathered at its next use.
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
        """Wait for the all-gathers before something else, such as a checkpoint, reads the parameters.

        Sharded weights (ZeRO-3) are left out.
        """
        for bucket in self.buckets:
            if bucket.weight_slots is None:
                bucket.complete()

    def write(
        self, parameters: Mapping[str, ShardedParameter], write: Callable[[list[ShardedParameter]], None]
    ) -> None:
        """Let `write` set the parameters' values, for example from a checkpoint; the call is collective.

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
    """Allocate a buffer's weights or main grads: one flat tensor. If sharded: the owned parts and the slots."""
    lengths = [layout.numel]
    if row.is_cut:
        lengths = [layout.numel // owners.size, *layout.slot_numels()]
    # Zeros for the padding: no gradient overwrites it, and the norm reads it with the owned parts.
    return [torch.zeros(numel, dtype=STORED_DTYPES[row.dtype], device=device) for numel in lengths]


def _buckets(
    layout: BufferLayout,
    owners: Axis,
    weights: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    replica_sums: ReplicaSums | None,
) -> list[Bucket]:
    slots = [Slot(scratch) for scratch in grads[1:]]
    buckets = []
    for number, bucket in enumerate(layout.buckets):
        owned = bucket.owned(owners.size, owners.index)
        places = [_places(bucket, owned, owners.size, tensors, number) for tensors in (weights, grads)]
        slot = slots[number % len(slots)] if slots else None
        buckets.append(Bucket(bucket, owned, owners, *places[0], *places[1], slot, replica_sums=replica_sums))
    if weights[1:]:
        in_slots = WeightSlots(buckets, len(weights[1:]))
        for each in buckets:
            each.weight_slots, each.is_complete, each.stays = in_slots, False, False
    return buckets


def _places(
    bucket: BucketLayout, owned: tuple[int, int], owners: int, tensors: Sequence[torch.Tensor], number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of bucket `number`: all its elements [stop - start], and the owned ones.

    If sharded, `tensors` are the owned parts, then the slots. No tensors: empty views.
    """
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
