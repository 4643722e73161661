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
    """A buffer range whose gradients are reduced in one call, and whose parameters are gathered in one.

    Attributes:
        owned: (start, stop) in the buffer; this data-parallel rank owns that part.
        owners: axis whose ranks own one part each.
        parameters, main_grads: the whole buffer's flat tensors.
        missing: number of gradients that each trained parameter still expects in this step.
        num_missing: total over `missing`.
        reducing, gathering: the reduce-scatter and the all-gather in flight, or None.
        version: number of parameter gathers so far.
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
        """Begin a step: main grads are stale, and each use of a parameter will add one gradient per microbatch."""
        for parameter in self.missing:
            parameter.has_grad = False
            self.missing[parameter] = parameter.num_uses * num_microbatches
        self.num_missing, self.on_grad = sum(self.missing.values()), on_grad

    def grad_added(self, parameter: ShardedParameter) -> None:
        """Count one gradient, from one use of the parameter in one microbatch; the bucket's last one posts its reduce-scatter."""
        # Called before counting: the last gradient posts a reduce-scatter, which overwrites the owned main grads.
        if self.on_grad is not None:
            self.on_grad(parameter)
        missing = self.missing[parameter] - 1
        assert missing >= 0, f"{parameter.record.name}: a gradient more than microbatches x uses was added"
        self.missing[parameter] = missing
        # Setting an `nn.Module` attribute runs slow Python code in torch, so it is set once a step, not per gradient.
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
        """Post the all-gather for the updated parameters."""
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
    """One buffer's tensors: `parameters` and `main_grads`, both [layout.numel]; untrained buffers have empty `main_grads`.

    Attributes:
        reduce_axis: axis whose ranks each own a part of every bucket.
        sum_axis: axis over which reduced gradients are still partial sums; None if they are complete.
        replica_index: this rank's index among those that hold the same parameters.
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
            # Untrained values change in small steps, by a rule of their own. They have no wide master, so they are stored wide.
            stored = dtype if is_trained else accumulation_dtype(dtype)
            values = torch.zeros(layout.numel, dtype=stored, device=device)
            # Padding must be zero: no gradient overwrites it, and the norm reads it with the owned parts.
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
        """The buckets in all buffers."""
        return (bucket for buffer in self.buffers for bucket in buffer.buckets)

    def start(self, num_microbatches: int, on_grad: OnGrad | None = None) -> None:
        """Begin a step: main grads are stale, and each parameter expects `num_microbatches` gradients per use.

        `on_grad` is called in this step with each parameter whose gradient was added, before its bucket is reduced.
        """
        for bucket in self.buckets:
            bucket.start(num_microbatches, on_grad)

    def finish(self) -> None:
        """Wait for the reductions; afterwards each bucket's owned part holds the whole gradient."""
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
        """Post the all-gathers for updated parameters, in the order in which the forward needs them.

        With `untrained`, the others are gathered too: those that are frozen, and those that every rank changes alike.
        """
        for buffer in self.buffers:
            if not (buffer.is_updated or untrained):
                continue
            # Buckets lie in backward order, the last layer first.
            for bucket in reversed(buffer.buckets):
                bucket.gather()

    def wait_all(self) -> None:
        """Complete every parameter, before something else reads it: when validation ends or a checkpoint begins."""
        for bucket in self.buckets:
            bucket.complete()
