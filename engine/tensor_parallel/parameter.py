"""A parameter as a layer uses it: this rank's weight, its main grad, and the sink that counts its gradients.

A `ShardedParameter` starts on the meta device from its record; later a grad buffer binds it to its place in two flat
tensors (`bind`):

    parameters  (run dtype)           [ .. q | kv | proj | up | down .. ]     all-gathered after the optimizer step
    main grads  (accumulation dtype)  [ .. q | kv | proj | up | down .. ]     reduce-scattered before it

Autograd never stores a gradient. The function that computes one adds it to the main grad (`add_grad`, or `add_matmul` and then
`grad_was_added`), which notifies the sink. The first gradient of a step overwrites the last step's, so main grads are never zeroed.
A weight-gradient GEMM may be deferred (`weight_grads.py`), which zero-bubble schedules need; the sink is notified when it runs.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import Protocol

import torch
from torch import nn

from engine.kernels.weight_grad import add
from engine.layout.shard_spec import ParamRecord


class GradSink(Protocol):
    """The owner of the flat tensors: counts added gradients, and completes a weight before its use."""

    def grad_added(self, parameter: "ShardedParameter") -> None: ...
    def is_first_grad(self, parameter: "ShardedParameter") -> bool: ...
    def weight_needed(self, parameter: "ShardedParameter") -> None: ...
    def weights_version(self) -> int: ...


class ShardedParameter(nn.Module):
    """One rank's part of one parameter.

    Attributes:
        record: name, shape, box and replicas.
        value: the weight, of `record.local_shape` in the run's dtype; a leaf whose `.grad` is never used.
        main_grad: accumulated gradient of that shape in the accumulation dtype; None before `bind`, and where it is not trained.
        num_uses: layers that use it. A tied embedding on one stage has two; each microbatch brings a gradient from both.
    """

    def __init__(self, record: ParamRecord, dtype: torch.dtype) -> None:
        super().__init__()
        self.record = record
        self.value = nn.Parameter(torch.empty(record.local_shape, dtype=dtype, device="meta"))
        self.main_grad: torch.Tensor | None = None
        self.num_uses = 1
        self._sink: GradSink | None = None

    def bind(self, value: torch.Tensor, main_grad: torch.Tensor | None, sink: GradSink) -> None:
        """Use these views of the flat tensors from now on."""
        # `.data` has its own version counter: the all-gather of another bucket writes to the same flat tensor while this weight is
        # in use, and autograd must not take that for a change of this weight.
        self.value = nn.Parameter(value.data, requires_grad=main_grad is not None)
        self.main_grad = main_grad
        self._sink = sink

    @property
    def is_trained(self) -> bool:
        """Return whether layers add gradients to it."""
        return self.record.is_trained

    def weight(self) -> torch.Tensor:
        """Return the complete weight; wait for the all-gather that fills it, if one is in flight."""
        if self._sink is not None:
            self._sink.weight_needed(self)
        return self.value

    def bound_main_grad(self) -> torch.Tensor:
        assert self.main_grad is not None, f"{self.record.name} has no grad buffer"
        return self.main_grad

    def is_first_grad(self) -> bool:
        """Return True until the first gradient of this step: that one overwrites instead of adding."""
        assert self._sink is not None, f"{self.record.name} has no grad buffer"
        return self._sink.is_first_grad(self)

    def add_grad(self, grad: torch.Tensor) -> None:
        """Add `grad` (the shape of the weight) to the main grad."""
        add(self.bound_main_grad(), grad, overwrite=self.is_first_grad())
        self.grad_was_added()

    def grad_was_added(self) -> None:
        """Notify the sink that one use in one microbatch has added its gradient."""
        assert self._sink is not None, f"{self.record.name} has no grad buffer"
        self._sink.grad_added(self)

    def tracked(self) -> torch.Tensor:
        """Return the weight for ordinary autograd code; its gradient goes to the main grad, if it is trained."""
        return _ToMainGrad.apply(self.weight(), self) if self.is_trained else self.weight().detach()


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


class FusedWeights:
    """Weights of one input, stacked by rows; one matrix where they are adjacent in the flat tensor.

    W = [W_1; W_2; ..] with W_i [rows_i, in]. Query and key/value weights are adjacent unless the key/value heads are replicated,
    whose gradients are in another buffer. Members are used together: each gets its gradients when the others do.
    """

    def __init__(self, members: Sequence[ShardedParameter], in_features: int | None) -> None:
        """Take the members and the width of their matrices; None for vectors (biases)."""
        self.members = tuple(members)
        self._in_features = in_features
        self._values = _MergedViews(in_features)
        # Of frozen members there is no gradient: those of a run of trained ones may be one matrix.
        self._trained = [
            (tuple(run), _MergedViews(in_features))
            for is_trained, run in groupby(members, key=lambda member: member.is_trained)
            if is_trained
        ]

    @property
    def is_trained(self) -> bool:
        """Return whether a member is."""
        return bool(self._trained)

    def version(self) -> int | None:
        """Return a number that changes with the weights, as copies of them must; None where they are not bound."""
        sink = self.members[0]._sink
        return None if sink is None else sink.weights_version()

    def matrices(self) -> list[torch.Tensor]:
        """Return the weights as few matrices [rows, in] (or vectors [rows]), as adjacency allows."""
        return self._values.of([member.weight() for member in self.members])

    def main_grads(self) -> Iterator[tuple[torch.Tensor, slice, bool]]:
        """Yield (main-grad matrix, its rows of W, overwrite) per run of adjacent trained members; then notify their sinks."""
        for members, main_grads in self._trained:
            overwrite = members[0].is_first_grad()
            assert all(member.is_first_grad() == overwrite for member in members[1:])
            first = self._first_row(members[0])
            for matrix in main_grads.of([member.bound_main_grad() for member in members]):
                yield matrix, slice(first, first + matrix.shape[0]), overwrite
                first += matrix.shape[0]
            for member in members:
                member.grad_was_added()

    def _first_row(self, member: ShardedParameter) -> int:
        before = takewhile(lambda other: other is not member, self.members)
        return sum(other.record.numel for other in before) // (self._in_features or 1)


class _MergedViews:
    """Views of tensors as matrices of one width (None: vectors), memory neighbours joined; cached for the same tensors."""

    def __init__(self, width: int | None) -> None:
        self._width = width
        self._tensors: Sequence[torch.Tensor] = ()
        self._views: list[torch.Tensor] = []

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len(tensors) != len(self._tensors) or any(a is not b for a, b in zip(tensors, self._tensors, strict=True)):
            self._tensors, self._views = tensors, self._merge([tensor.detach() for tensor in tensors])
        return self._views

    def _merge(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        views = [tensor.reshape(-1) if self._width is None else tensor.reshape(-1, self._width) for tensor in tensors]
        merged = views[:1]
        for view in views[1:]:
            last = merged[-1]
            # Offsets instead of addresses: tensors without memory (footprints) are adjacent in the same way.
            is_one_storage = last.untyped_storage()._cdata == view.untyped_storage()._cdata
            if is_one_storage and last.storage_offset() + last.numel() == view.storage_offset():
                merged[-1] = torch.as_strided(last, (last.shape[0] + view.shape[0], *last.shape[1:]), last.stride())
            else:
                merged.append(view)
        return merged
