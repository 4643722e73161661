"""Flat parameters and main grads of one rank, reduced and gathered bucket by bucket while compute goes on.

A buffer (`param_layout.py`) has two flat tensors: parameters in the run's dtype, main grads in its accumulation dtype (or narrower,
`precision.gradients`). Parameters that are changed by a rule of their own, such as routers' biases, are in the accumulation dtype
and have no main grads. Gradients of frozen parameters are computed and reduced like others; nothing reads them. A step:

    start(m)          main grads are stale; each parameter expects m gradients for each of its uses, and the first overwrites
    backward ...      each added gradient is counted (`grad_added`); the last one of a bucket posts its reduce-scatter over
                      dp (of experts: expert_dp), which runs under the rest of the backward
    finish()          waits for the reduce-scatters, then all-reduces owned parts that are partial sums over a further axis
    (optimizer)       writes the owned part of the parameters
    gather()          posts the all-gathers; `complete` waits for a bucket when the next forward needs it

Nothing marks "the last microbatch": a bucket is ready when its count is. A count that is off at the end of the step is an error
that names the parameter.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import REPLICA_GRADIENTS
from triaxis.engine.layout.param_layout import BucketLayout, BufferLayout
from triaxis.engine.layout.shard_spec import ReduceAxis
from triaxis.engine.numerics.precision import accumulation_dtype
from triaxis.engine.tensor_parallel.parameter import ShardedParameter

OnGrad = Callable[[ShardedParameter], None]
"""Called with a parameter whose gradient was added, before its bucket is reduced."""


@dataclass
class Bucket:
    """A stretch of a buffer whose gradients are reduced in one call, and whose parameters are gathered in one.

    Attributes:
        owned: (start, stop) in the buffer of the part that this data-parallel rank owns.
        owners: the axis whose ranks own a part each.
        parameters, main_grads: flat tensors of the whole buffer.
        missing: number of gradients that each parameter still expects in this step; only parameters that get gradients.
        num_missing: sum of `missing`.
        reducing, gathering: the reduce-scatter and the all-gather in flight, or None.
        version: number of gathers of the parameters.
    """

    layout: BucketLayout
    owned: tuple[int, int]
    owners: Axis
    parameters: torch.Tensor
    main_grads: torch.Tensor
    missing: dict[ShardedParameter, int] = field(default_factory=dict)
    num_missing: int = 0
    on_grad: OnGrad | None = None
    reducing: Pending | None = None
    gathering: Pending | None = None
    version: int = 0

    def start(self, num_microbatches: int, on_grad: OnGrad | None) -> None:
        """Begin a step: main grads are stale, and each use of a parameter will add a gradient per microbatch."""
        for parameter in self.missing:
            parameter.has_grad = False
            self.missing[parameter] = parameter.num_uses * num_microbatches
        self.num_missing, self.on_grad = sum(self.missing.values()), on_grad

    def grad_added(self, parameter: ShardedParameter) -> None:
        """Count a gradient that one use of the parameter added in a microbatch; the bucket's last one posts its reduce-scatter."""
        # Before the count: the last gradient posts a reduce-scatter, which writes over the owned part of the main grads.
        if self.on_grad is not None:
            self.on_grad(parameter)
        missing = self.missing[parameter] - 1
        assert missing >= 0, f"{parameter.record.name}: a gradient more than microbatches x uses was added"
        self.missing[parameter] = missing
        # Setting an attribute of an `nn.Module` runs slow Python code of torch: do it once a step, not for each gradient.
        if not parameter.has_grad:
            parameter.has_grad = True
        self.num_missing -= 1
        if self.num_missing == 0:
            # [bucket] -> [bucket / owners], into the owned part, without another buffer. Other parts keep this rank's own sums.
            start, stop = self.owned
            self.reducing = self.owners.reduce_scatter(
                self.main_grads[self.layout.start : self.layout.stop], "gradients", out=self.main_grads[start:stop]
            )

    def gather(self) -> None:
        """Post the all-gather of the updated parameters."""
        start, stop = self.owned
        self.gathering = self.owners.all_gather(
            self.parameters[start:stop], "parameters", out=self.parameters[self.layout.start : self.layout.stop]
        )
        self.version += 1

    def complete(self) -> None:
        """Wait for the all-gather in flight, if there is one."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None


@dataclass
class FlatBuffer:
    """The tensors of one buffer: `parameters` and `main_grads`, both [layout.numel]; untrained, `main_grads` is empty.

    Attributes:
        reduce_axis: the axis whose ranks own a part of each bucket.
        sum_axis: the axis over which reduced gradients are still partial sums; None: they are whole.
        replica_index: this rank's number among the holders of the same parameters.
        is_updated: whether the optimizer changes the parameters: they are trained, and not frozen.
    """

    layout: BufferLayout
    parameters: torch.Tensor
    main_grads: torch.Tensor
    buckets: list[Bucket]
    reduce_axis: Axis
    sum_axis: Axis | None
    replica_index: int
    is_updated: bool


class GradBuffers:
    """All flat buffers of one rank.

    A bucket joins many parameters, since a collective for each of them would be small and bound by latency. A buffer has many
    buckets, so the first reductions run while most of the backward is still ahead. Gradients are counted, not hooked on a module's
    end: microbatches, weights with two uses and deferred GEMMs then need no case of their own.

    Args:
        layouts: the frozen layout of this rank's parameters.
        parameters: the modules' parameters by name; they are bound to views of the flat tensors.
        reduce_axes: the axes over which gradients are reduced, by name, as far as this rank has them.
        axes: the axes over which gradients of replicas are summed, by name, as far as this rank has them.

    Attributes:
        dtype: the run's dtype, of trained parameters.
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
        self.buffers: list[FlatBuffer] = []
        for layout in layouts:
            is_trained, owners = layout.key.is_trained, reduce_axes[layout.key.reduce_over]
            # Untrained values are changed in small steps by a rule of their own. They have no wide master, so they are wide.
            stored = dtype if is_trained else accumulation_dtype(dtype)
            values = torch.zeros(layout.numel, dtype=stored, device=device)
            # Zeros for the padding: no gradient overwrites it, and the norm reads it with the owned parts.
            main_grads = torch.zeros(layout.numel if is_trained else 0, dtype=grad_dtype, device=device)
            buffer = FlatBuffer(
                layout=layout,
                parameters=values,
                main_grads=main_grads,
                buckets=[
                    Bucket(bucket, bucket.owned(owners.size, owners.index), owners, values, main_grads)
                    for bucket in layout.buckets
                ],
                reduce_axis=owners,
                sum_axis=None if layout.key.sum_over is None else axes[layout.key.sum_over],
                replica_index=0 if layout.key.replicas is None else axes[layout.key.replicas].index,
                is_updated=layout.key.is_updated,
            )
            self.buffers.append(buffer)
            for bucket in buffer.buckets:
                for entry in bucket.layout.entries:
                    parameter = parameters[entry.record.name]
                    shape, where = entry.record.local_shape, slice(entry.start, entry.stop)
                    parameter.bind(
                        values[where].view(shape), main_grads[where].view(shape) if is_trained else None, bucket
                    )
                    if is_trained:
                        bucket.missing[parameter] = 0

    @property
    def buckets(self) -> Iterator[Bucket]:
        """Return the buckets of all buffers."""
        return (bucket for buffer in self.buffers for bucket in buffer.buckets)

    def start(self, num_microbatches: int, on_grad: OnGrad | None = None) -> None:
        """Begin a step: main grads are stale, and `num_microbatches` gradients are expected per use of each parameter.

        `on_grad` is called in this step with each parameter whose gradient was added, before its bucket is reduced.
        """
        for bucket in self.buckets:
            bucket.start(num_microbatches, on_grad)

    def finish(self) -> None:
        """Wait for the reductions; afterwards the owned part of each bucket holds the whole gradient."""
        late = [each.record.name for bucket in self.buckets for each, missing in bucket.missing.items() if missing]
        assert not late, f"gradients are missing at the end of the step: {', '.join(late[:5])}"
        sums = []
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                if not bucket.missing:
                    continue  # its parameters are not trained
                assert bucket.reducing is not None
                bucket.reducing.wait()
                bucket.reducing = None
                # The second sum comes after the first, on [bucket / owners] elements in place of [bucket]. Replicas cut a buffer
                # alike (`param_layout.py`), so they own the same parts and post these calls in the same order.
                if buffer.sum_axis is not None:
                    start, stop = bucket.owned
                    owned = buffer.main_grads[start:stop]
                    sums.append(buffer.sum_axis.all_reduce(owned, REPLICA_GRADIENTS))
        for pending in sums:
            pending.wait()

    def gather(self, *, untrained: bool = False) -> None:
        """Post the all-gathers of the updated parameters, in the order in which the forward needs them.

        `untrained`: gather the others too, which are frozen or which every rank changes alike.
        """
        for buffer in self.buffers:
            if not (buffer.is_updated or untrained):
                continue
            # Buckets lie in the order of the backward, the last layer first.
            for bucket in reversed(buffer.buckets):
                bucket.gather()

    def wait_all(self) -> None:
        """Complete every parameter (before it is read from outside: validation ends, a checkpoint begins)."""
        for bucket in self.buckets:
            bucket.complete()
