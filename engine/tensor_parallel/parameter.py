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
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import nn

from engine.kernels.weight_grad import add
from engine.layout.shard_spec import ParamRecord


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
        is_trained: layers add gradients to it.
        value: the weight, of `record.local_shape` in the run's dtype; a leaf whose `.grad` is never used.
        main_grad: accumulated gradient of that shape in the accumulation dtype; None before `bind`, and where it is not trained.
        num_uses: layers that use it. A tied embedding on one stage has two; each microbatch brings a gradient from both.
        num_bindings: how often `value` was set, and with it the main grad; views of them are made anew afterwards.
    """

    def __init__(self, record: ParamRecord, dtype: torch.dtype) -> None:
        super().__init__()
        self.record = record
        self.is_trained = record.is_trained
        self.num_bindings = 0
        self.value = nn.Parameter(torch.empty(record.local_shape, dtype=dtype, device="meta"))
        self.main_grad: torch.Tensor | None = None
        self.num_uses = 1
        self._sink: GradSink | None = None

    def bind(self, value: torch.Tensor, main_grad: torch.Tensor | None, sink: GradSink) -> None:
        """Use these views of the flat tensors from now on."""
        self.main_grad = main_grad
        self._sink = sink
        # `.data` has its own version counter: the all-gather of another bucket writes to the same flat tensor while this weight is
        # in use, and autograd must not take that for a change of this weight.
        self.value = nn.Parameter(value.data, requires_grad=main_grad is not None)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "value":
            self.num_bindings += 1

    def weight(self) -> torch.Tensor:
        """Return the complete weight; wait for the all-gather that fills it, if one is in flight."""
        if self._sink is not None:
            self._sink.weights_needed((self,))
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

    Views of weights and main grads are made once for the tensors that members are bound to, not once for each use.

    Attributes:
        all_rows: the rows of W.
    """

    def __init__(self, members: Sequence[ShardedParameter], in_features: int | None) -> None:
        """Take the members and the width of their matrices; None for vectors (biases)."""
        self.members = tuple(members)
        self._values = _MergedViews(self.members, "value", in_features, first_row=0)
        first, runs = 0, []
        # Of frozen members there is no gradient: those of a run of trained ones may be one matrix.
        for is_trained, run in groupby(self.members, key=lambda member: member.is_trained):
            group = tuple(run)
            if is_trained:
                runs.append((group, _MergedViews(group, "main_grad", in_features, first)))
            first += sum(member.record.numel for member in group) // (in_features or 1)
        self._trained = runs
        self.is_trained = bool(runs)
        self.all_rows = slice(0, first)

    def version(self) -> int | None:
        """Return a number that changes with the weights, as copies of them must; None where they are not bound."""
        sink = self.members[0]._sink
        return None if sink is None else sink.weights_version()

    def matrices(self) -> list[torch.Tensor]:
        """Return the weights as few matrices [rows, in] (or vectors [rows]), as adjacency allows."""
        return self._complete().views

    def transposes(self) -> list[torch.Tensor]:
        """Return those matrices as [in, rows]."""
        return self._complete().transposes

    def _complete(self) -> "_MergedViews":
        sink = self.members[0]._sink
        if sink is not None:
            sink.weights_needed(self.members)
        return self._values.now()

    def main_grads(self) -> Iterator[tuple[torch.Tensor, slice, bool]]:
        """Yield (main-grad matrix, its rows of W, overwrite) per run of adjacent trained members; then notify their sinks."""
        for members, main_grads in self._trained:
            overwrite = members[0].is_first_grad()
            for member in members[1:]:
                assert member.is_first_grad() == overwrite, "members are used together"
            main_grads.now()
            for matrix, rows in zip(main_grads.views, main_grads.rows, strict=True):
                yield matrix, rows, overwrite
            for member in members:
                member.grad_was_added()


class _MergedViews:
    """Views of parameters' tensors as matrices of one width (None: vectors), memory neighbours joined; kept for the same tensors.

    Args:
        members: the parameters.
        name: of the tensor, an attribute of each.
        width: of the matrices.
        first_row: of W, where the first matrix begins.

    Attributes:
        views, transposes: the matrices [rows, in] and [in, rows], after `now`.
        rows: theirs, of W.
    """

    def __init__(self, members: Sequence[ShardedParameter], name: str, width: int | None, first_row: int) -> None:
        self._members = members
        self._name = name
        self._width = width
        self._first_row = first_row
        self._bindings: list[int] = []
        self.views: list[torch.Tensor] = []
        self.transposes: list[torch.Tensor] = []
        self.rows: list[slice] = []

    def now(self) -> "_MergedViews":
        """Return this object with views of the tensors that members have now."""
        bindings = self._bindings
        for place, member in enumerate(self._members):
            if not bindings or member.num_bindings != bindings[place]:
                self._make()
                break
        return self

    def _make(self) -> None:
        self._bindings = [member.num_bindings for member in self._members]
        self.views = self._merge([getattr(member, self._name).detach() for member in self._members])
        self.transposes = [view.t() for view in self.views]
        first, self.rows = self._first_row, []
        for view in self.views:
            self.rows.append(slice(first, first + view.shape[0]))
            first += view.shape[0]

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
