"""A parameter as a layer uses it: this rank's weight, its main grad, and the bucket that holds both.

A `ShardedParameter` starts on the meta device from its record; later a grad buffer binds it to its place in two flat
tensors (`bind`):

    parameters  (run dtype)           [ .. q | kv | proj | up | down .. ]     all-gathered after the optimizer step
    main grads  (accumulation dtype)  [ .. q | kv | proj | up | down .. ]     reduce-scattered before the step

Autograd never stores a gradient. The function that computes one adds it to the main grad and tells the bucket (`add_grad`). The
first gradient of a step overwrites the last step's (`has_grad`), so main grads are never zeroed. A weight-gradient GEMM may be
deferred (`engine/linear/weight_grads.py`), which zero-bubble schedules need; the bucket is told when it runs.
"""

from typing import Protocol

import torch
from torch import nn

from triaxis.engine.comm.backends import Pending
from triaxis.engine.kernels.weight_grad import add
from triaxis.engine.layout.shard_spec import ParamRecord


class ParameterBucket(Protocol):
    """The bucket of a parameter (`triaxis.engine.optimizer.grad_buffer.Bucket`).

    Attributes:
        gathering: the all-gather of its weights in flight; None: the weights are complete.
        version: number of gathers, one after each update and one after loading.
    """

    gathering: Pending | None
    version: int

    def complete(self) -> None: ...
    def grad_added(self, parameter: "ShardedParameter") -> None: ...


class ShardedParameter(nn.Module):
    """One rank's part of one parameter.

    It is a module, not an `nn.Parameter`, because `bind` replaces the tensor: layers keep this object and get the weight from it at
    each use. `weight` waits for the all-gather that fills it, so layers know nothing of buffers. A hook of autograd would be given
    each gradient as a tensor of its own; here the GEMM that computes it can add to the main grad itself.

    Attributes:
        record: name, shape, box and replicas.
        value: the weight, of `record.local_shape` in the run's dtype; a leaf whose `.grad` is never used.
        main_grad: accumulated gradient of that shape, in the accumulation dtype or narrower (`precision.gradients`); None before
            `bind`, and if layers add none.
        num_uses: number of layers that use it. A tied embedding on one stage has two; each adds a gradient per microbatch.
        bucket: counter of added gradients, which also completes the weights; None before `bind`, and if only the weight is bound.
        has_grad: whether the main grad has a gradient of this step; if not, the next one overwrites it.
        num_bindings: number of `bind` calls; holders of views make new ones after each.
    """

    def __init__(self, record: ParamRecord, dtype: torch.dtype) -> None:
        super().__init__()
        self.record = record
        self.num_bindings = 0
        self.value = nn.Parameter(torch.empty(record.local_shape, dtype=dtype, device="meta"))
        self.main_grad: torch.Tensor | None = None
        self.num_uses = 1
        self.bucket: ParameterBucket | None = None
        self.has_grad = False

    def bind(
        self, value: torch.Tensor, main_grad: torch.Tensor | None = None, bucket: ParameterBucket | None = None
    ) -> None:
        """Use these views of the flat tensors as weight and main grad from now on."""
        self.main_grad = main_grad
        self.bucket = bucket
        self.num_bindings += 1
        # `.data` has its own version counter: the all-gather of another bucket writes to the same flat tensor while this weight is
        # in use, and autograd must not take that for a change of this weight.
        self.value = nn.Parameter(value.data, requires_grad=main_grad is not None)

    def weight(self) -> torch.Tensor:
        """Return the complete weight; wait for the all-gather that fills it, if one is in flight."""
        if self.bucket is not None and self.bucket.gathering is not None:
            self.bucket.complete()
        return self.value

    def bound_main_grad(self) -> torch.Tensor:
        assert self.main_grad is not None, f"{self.record.name} has no grad buffer"
        return self.main_grad

    def add_grad(self, grad: torch.Tensor) -> None:
        """Add `grad` (the shape of the weight) to the main grad."""
        add(self.bound_main_grad(), grad, overwrite=not self.has_grad)
        self.grad_was_added()

    def grad_was_added(self) -> None:
        """Tell the bucket that one use in one microbatch has added its gradient."""
        assert self.bucket is not None, f"{self.record.name} has no grad buffer"
        self.bucket.grad_added(self)

    def tracked(self) -> torch.Tensor:
        """Return the weight for ordinary autograd code; its gradient goes to the main grad."""
        tracked: torch.Tensor = _ToMainGrad.apply(self.weight(), self)
        return tracked


class _ToMainGrad(torch.autograd.Function):
    """Identity whose backward adds to the main grad instead of filling `.grad`."""

    @staticmethod
    def forward(ctx, value: torch.Tensor, parameter: ShardedParameter) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.parameter = parameter
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[None, None]:  # type: ignore[no-untyped-def]
        ctx.parameter.add_grad(grad)
        return None, None
