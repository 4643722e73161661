"""Flat parameters and main grads of one rank, reduced and gathered bucket by bucket while compute goes on.

Per buffer (see `param_layout.py`) two flat tensors: parameters in the run's dtype, main grads in its accumulation dtype
(or narrower, `precision.gradients`). Parameters that a rule of their own changes have no main grads, and the accumulation dtype.
Gradients of frozen ones are computed and reduced like any other's; nothing reads them. A step:

    start(m)          main grads are old; each parameter expects m microbatches x its uses, and writes the first over them
    backward ...      each added gradient is counted (`grad_added`); when the last one of a bucket is in, its
                      reduce-scatter over dp (of experts: expert_dp) is posted, under the rest of the backward
    finish()          waits for them, then sums the owned parts that are partial sums over a further axis
    (optimizer)       writes the owned part of the parameters
    gather()          posts the all-gathers; `weights_needed` waits for a bucket where the next forward needs it

There is no switch for "the last microbatch": readiness is a count, and a count that is off at the end of the step is
an error that names the parameter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import REPLICA_GRADIENTS, Pending
from triaxis.engine.layout.param_layout import BucketLayout, BufferLayout
from triaxis.engine.layout.shard_spec import ReduceAxis
from triaxis.engine.numerics.precision import accumulation_dtype
from triaxis.engine.tensor_parallel.parameter import ShardedParameter


@dataclass
class Bucket:
    """One bucket's live state.

    Attributes:
        owned: (start, stop) in the buffer of the part that this data-parallel rank owns.
        missing: gradients that have not been added yet in this step.
    """

    layout: BucketLayout
    owned: tuple[int, int]
    missing: int = 0
    reducing: Pending | None = None
    gathering: Pending | None = None


@dataclass
class FlatBuffer:
    """The tensors of one buffer: `parameters` and `main_grads`, both [layout.numel]; without training `main_grads` is empty.

    `reduce_axis` has the ranks that own parts of each bucket.
    """

    layout: BufferLayout
    parameters: torch.Tensor
    main_grads: torch.Tensor
    buckets: list[Bucket]
    reduce_axis: Axis
    sum_axis: Axis | None
    replica_index: int


@dataclass
class _Place:
    """The place of one parameter, and how many gradients it expects in this step and still misses."""

    parameter: ShardedParameter
    buffer: FlatBuffer
    bucket: Bucket
    expected: int = 0
    missing: int = 0


class GradBuffers:
    """All flat buffers of one rank.

    Args:
        layouts: the frozen layout of this rank's parameters.
        parameters: the modules' parameters by name; they are bound to views of the flat tensors.
        reduce_axes: the axes over which gradients are reduced, by name, as far as this rank has them.
        axes: the axes over which gradients of replicas are summed, by name, as far as this rank has them.

    Attributes:
        dtype: of the weights.
    """

    def __init__(
        self,
        layouts: tuple[BufferLayout, ...],
        parameters: Mapping[str, ShardedParameter],
        dtype: torch.dtype,
        grad_dtype: torch.dtype,
        device: torch.device,
        reduce_axes: Mapping[ReduceAxis, Axis],
        axes: Mapping[str, Axis],
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._on_grad: Callable[[ShardedParameter], None] | None = None
        self._version = 0
        self.buffers: list[FlatBuffer] = []
        # By the objects: these are looked up several times for each layer and microbatch.
        self._places: dict[ShardedParameter, _Place] = {}
        for layout in layouts:
            is_trained, owners = layout.key.is_trained, reduce_axes[layout.key.reduce_over]
            numel = layout.numel
            stored = dtype if is_trained else accumulation_dtype(dtype)
            buffer = FlatBuffer(
                layout=layout,
                parameters=torch.zeros(numel, dtype=stored, device=device),
                main_grads=torch.zeros(numel if is_trained else 0, dtype=grad_dtype, device=device),
                buckets=[Bucket(bucket, bucket.owned(owners.size, owners.index)) for bucket in layout.buckets],
                reduce_axis=owners,
                sum_axis=None if layout.key.sum_over is None else axes[layout.key.sum_over],
                replica_index=0 if layout.key.replicas is None else axes[layout.key.replicas].index,
            )
            self.buffers.append(buffer)
            for bucket in buffer.buckets:
                for entry in bucket.layout.entries:
                    parameter = parameters[entry.record.name]
                    self._places[parameter] = _Place(parameter, buffer, bucket)
                    shape, where = entry.record.local_shape, slice(entry.start, entry.stop)
                    main_grad = buffer.main_grads[where].view(shape) if is_trained else None
                    parameter.bind(buffer.parameters[where].view(shape), main_grad, self)

    @property
    def _trained(self) -> Iterator[FlatBuffer]:
        return (buffer for buffer in self.buffers if buffer.layout.key.is_trained)

    def start(self, num_microbatches: int, on_grad: Callable[[ShardedParameter], None] | None = None) -> None:
        """Begin a step: main grads are old, and `num_microbatches` gradients are expected per use of each parameter.

        `on_grad` is called in this step with each parameter whose gradient was added, before its bucket is reduced.
        """
        self._on_grad = on_grad
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                bucket.missing = 0
        for place in self._places.values():
            if not place.buffer.layout.key.is_trained:
                continue
            place.expected = place.missing = place.parameter.num_uses * num_microbatches
            place.bucket.missing += place.missing

    def is_first_grad(self, parameter: ShardedParameter) -> bool:
        """Return whether the parameter has got no gradient in this step yet."""
        place = self._places[parameter]
        return place.missing == place.expected

    def grad_added(self, parameter: ShardedParameter) -> None:
        """Count the gradient of one microbatch that one use of the parameter has added."""
        if self._on_grad is not None:
            self._on_grad(parameter)
        place = self._places[parameter]
        place.missing -= 1
        assert place.missing >= 0, f"{parameter.record.name}: a gradient more than microbatches x uses was added"
        place.bucket.missing -= 1
        if place.bucket.missing == 0:
            bucket, buffer = place.bucket, place.buffer
            start, stop = bucket.owned
            bucket.reducing = buffer.reduce_axis.reduce_scatter(
                buffer.main_grads[bucket.layout.start : bucket.layout.stop],
                "gradients",
                out=buffer.main_grads[start:stop],
            )

    def finish(self) -> None:
        """Wait for the reductions; afterwards the owned part of each bucket holds the whole gradient."""
        late = [parameter.record.name for parameter, place in self._places.items() if place.missing]
        assert not late, f"gradients are missing at the end of the step: {', '.join(late[:5])}"
        sums = []
        for buffer in self._trained:
            for bucket in buffer.buckets:
                assert bucket.reducing is not None
                bucket.reducing.wait()
                bucket.reducing = None
                if buffer.sum_axis is not None:
                    start, stop = bucket.owned
                    owned = buffer.main_grads[start:stop]
                    sums.append(buffer.sum_axis.all_reduce(owned, REPLICA_GRADIENTS))
        for pending in sums:
            pending.wait()

    def gather(self, *, untrained: bool = False) -> None:
        """Post the all-gathers of the updated parameters, in the order in which the forward needs them.

        `untrained`: also of those that are not trained: they are frozen, or every rank changes them alike.
        """
        self._version += 1
        for buffer in self.buffers:
            if not (buffer.layout.key.is_updated or untrained):
                continue
            for bucket in reversed(buffer.buckets):
                start, stop = bucket.owned
                bucket.gathering = buffer.reduce_axis.all_gather(
                    buffer.parameters[start:stop],
                    "parameters",
                    out=buffer.parameters[bucket.layout.start : bucket.layout.stop],
                )

    def weights_version(self) -> int:
        """Return how often parameters were gathered: after each update, and when they are loaded."""
        return self._version

    def weights_needed(self, parameters: Sequence[ShardedParameter]) -> None:
        """Complete the parameters' buckets before they are used."""
        for parameter in parameters:
            bucket = self._places[parameter].bucket
            if bucket.gathering is not None:
                bucket.gathering.wait()
                bucket.gathering = None

    def wait_all(self) -> None:
        """Complete every parameter (before it is read from outside: validation ends, a checkpoint begins)."""
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                if bucket.gathering is not None:
                    bucket.gathering.wait()
                    bucket.gathering = None
