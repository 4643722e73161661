"""A parameter as a layer uses it: this rank's weight, its main grad, and the sink that counts its gradients.

A `ShardedParameter` starts on the meta device from its record; later a grad buffer binds it to its place in two flat
tensors (`bind`):

    parameters  (run dtype)           [ .. q | kv | proj | up | down .. ]     all-gathered after the optimizer step
    main grads  (accumulation dtype)  [ .. q | kv | proj | up | down .. ]     reduce-scattered before it

Autograd never stores a gradient. The function that computes one adds it to the main grad (`add_grad`, or `add_matmul` and then
`grad_was_added`), which notifies the sink. The first gradient of a step overwrites the last step's, so main grads are never zeroed.
A weight-gradient GEMM may be deferred (`weight_grads.py`), which zero-bubble schedules need; the sink is notified when it runs.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from triaxis.engine.kernels.weight_grad import add
from triaxis.engine.layout.shard_spec import ParamRecord


class GradSink(Protocol):
    """The owner of the flat tensors: counts added gradients, and completes a weight before its use."""

    def grad_added(self, parameter: "ShardedParameter") -> None: ...
    def is_first_grad(self, parameter: "ShardedParameter") -> bool: ...
    def weights_needed(self, parameters: Sequence["ShardedParameter"]) -> None: ...
    def weights_version(self) -> int: ...


class ShardedParameter(nn.Module):
    """One rank's part of one parameter.

    Attributes:
        record: name, shape, box and replicas.
        value: the weight, of `record.local_shape` in the run's dtype; a leaf whose `.grad` is never used.
        main_grad: accumulated gradient of that shape in the accumulation dtype; None before `bind`, and where layers add none.
        num_uses: layers that use it. A tied embedding on one stage has two; each microbatch brings a gradient from both.
        sink: the owner of the flat tensors; None before `bind`.
        num_bindings: how often `bind` was called; views of the tensors are made anew afterwards.
    """

    def __init__(self, record: ParamRecord, dtype: torch.dtype) -> None:
        super().__init__()
        self.record = record
        self.num_bindings = 0
        self.value = nn.Parameter(torch.empty(record.local_shape, dtype=dtype, device="meta"))
        self.main_grad: torch.Tensor | None = None
        self.num_uses = 1
        self.sink: GradSink | None = None

    def bind(self, value: torch.Tensor, main_grad: torch.Tensor | None = None, sink: GradSink | None = None) -> None:
        """Use these views of the flat tensors from now on."""
        self.main_grad = main_grad
        self.sink = sink
        self.num_bindings += 1
        # `.data` has its own version counter: the all-gather of another bucket writes to the same flat tensor while this weight is
        # in use, and autograd must not take that for a change of this weight.
        self.value = nn.Parameter(value.data, requires_grad=main_grad is not None)

    def weight(self) -> torch.Tensor:
        """Return the complete weight; wait for the all-gather that fills it, if one is in flight."""
        if self.sink is not None:
            self.sink.weights_needed((self,))
        return self.value

    def bound_sink(self) -> GradSink:
        assert self.sink is not None, f"{self.record.name} has no grad buffer"
        return self.sink

    def bound_main_grad(self) -> torch.Tensor:
        assert self.main_grad is not None, f"{self.record.name} has no grad buffer"
        return self.main_grad

    def is_first_grad(self) -> bool:
        """Return True until the first gradient of this step: that one overwrites instead of adding."""
        return self.bound_sink().is_first_grad(self)

    def add_grad(self, grad: torch.Tensor) -> None:
        """Add `grad` (the shape of the weight) to the main grad."""
        add(self.bound_main_grad(), grad, overwrite=self.is_first_grad())
        self.grad_was_added()

    def grad_was_added(self) -> None:
        """Notify the sink that one use in one microbatch has added its gradient."""
        self.bound_sink().grad_added(self)

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
