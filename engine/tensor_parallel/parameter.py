"""Sharded parameters: this rank's weight, its main grad, and the bucket that holds both.

A `ShardedParameter` is created on the meta device. Later a grad buffer binds it to its place in two flat tensors (`bind`):

    parameters  (run dtype)           [ .. q | kv | proj | up | down .. ]     all-gathered after the optimizer step
    main grads  (accumulation dtype)  [ .. q | kv | proj | up | down .. ]     reduce-scattered before the step

Autograd never stores a gradient. The function that computes a gradient adds it to the main grad and notifies the bucket. A step's
first gradient overwrites the previous step's (`overwrites`), so main grads are never zeroed.
"""

from typing import Protocol

import torch
from torch import nn

from triaxis.engine.errors import ConfigError
from triaxis.engine.kernels.weight_grad import add
from triaxis.engine.layout.shard_spec import ParamRecord


class ParameterBucket(Protocol):
    """Bucket that holds a parameter (`triaxis.engine.optimizer.bucket.Bucket`).

    Attributes:
        is_complete: whether all dp ranks' parts of the weights are gathered now.
        stays: whether gathered weights stay in memory until the next update; not with ZeRO-3.
        version: number of changes to the weights, by updates and by loading.
    """

    is_complete: bool
    stays: bool
    version: int

    def complete(self) -> None: ...
    def overwrites(self, parameter: "ShardedParameter") -> bool: ...
    def grad_added(self, parameter: "ShardedParameter") -> None: ...


class ShardedParameter(nn.Module):
    """One rank's shard of a parameter.

    It is a module rather than an `nn.Parameter` because `bind` replaces the tensor. Layers keep this object and call `weight` at
    each use.

    Attributes:
        record: name, shape, replicas, and box (this rank's part).
        value: weight with shape `record.local_shape` in the run's dtype; a leaf whose `.grad` is never used.
        main_grad: accumulated gradient with the weight's shape, in the accumulation dtype or narrower (`precision.gradients`); None
            before `bind`, and if layers add no gradient.
        num_uses: number of layers that use the parameter, each of which adds a gradient per microbatch; two for a tied embedding on
            one stage.
        bucket: bucket that counts added gradients and all-gathers the weights over dp; None before `bind`, and if `bind` got the
            weight alone.
        num_bindings: number of `bind` calls so far; code that holds views must renew them after each call.
    """

    def __init__(self, record: ParamRecord, dtype: torch.dtype) -> None:
        super().__init__()
        self.record = record
        self.num_bindings = 0
        self.value = nn.Parameter(torch.empty(record.local_shape, dtype=dtype, device="meta"))
        self.main_grad: torch.Tensor | None = None
        self.num_uses = 1
        self.bucket: ParameterBucket | None = None

    def bind(
        self, value: torch.Tensor, main_grad: torch.Tensor | None = None, bucket: ParameterBucket | None = None
    ) -> None:
        """Use these flat-tensor views as weight and main grad from now on. With no main grad, the weight needs no gradient."""
        self.main_grad = main_grad
        self.bucket = bucket
        self.num_bindings += 1
        # `.data` has its own version counter. Another bucket's all-gather writes to the same flat tensor while this weight is in
        # use, and autograd must not take that for a change to this weight.
        self.value = nn.Parameter(value.data, requires_grad=main_grad is not None)

    def renew(self) -> None:
        """Replace the weight with another leaf over the same memory. No autograd graph has it yet."""
        self.value = nn.Parameter(self.value.data, requires_grad=self.value.requires_grad)

    def weight(self) -> torch.Tensor:
        """Return the weight after waiting for its all-gather. With ZeRO-3 the call may also start the all-gather."""
        if self.bucket is not None and not self.bucket.is_complete:
            self.bucket.complete()
        return self.value

    def bound_main_grad(self) -> torch.Tensor:
        assert self.main_grad is not None, f"{self.record.name} has no grad buffer"
        return self.main_grad

    def bound_bucket(self) -> ParameterBucket:
        assert self.bucket is not None, f"{self.record.name} has no grad buffer"
        return self.bucket

    def overwrites(self) -> bool:
        """Return whether the next gradient replaces the main grad. The call may also prepare the bucket for new gradients."""
        return self.bound_bucket().overwrites(self)

    def add_grad(self, grad: torch.Tensor) -> None:
        """Add `grad`, shaped like the weight, to the main grad, or replace a stale main grad. Notify the bucket."""
        overwrite = self.overwrites()
        add(self.bound_main_grad(), grad, overwrite=overwrite)
        self.grad_was_added()

    def grad_was_added(self) -> None:
        """Notify the bucket that one use has added its gradient for one microbatch."""
        self.bound_bucket().grad_added(self)

    def tracked(self) -> torch.Tensor:
        """Return the weight for ordinary autograd code; its gradient goes to the main grad.

        Raises:
            ConfigError: ZeRO-3 reuses the gathered weight's memory, so a weight that autograd saved would be overwritten.
        """
        if self.bucket is not None and not self.bucket.stays:
            raise ConfigError(
                [
                    f"parallel.zero=3: {self.record.name} is read outside a linear layer, so autograd would keep a weight that "
                    "the next layers overwrite. Set in_backward=True in its ParamSpec, and every rank keeps it whole."
                ]
            )
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
