"""Weights that are used together, as few matrices as their places in the flat tensors allow."""

from collections.abc import Iterator, Sequence

import torch

from triaxis.engine.tensor_parallel.parameter import ShardedParameter


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
        self._values = _MergedViews(self.members, "value", in_features)
        self._main_grads = _MergedViews(self.members, "main_grad", in_features)
        self.all_rows = slice(0, sum(member.record.numel for member in self.members) // (in_features or 1))

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
        """Yield (main-grad matrix, its rows of W, overwrite) per run of adjacent members; then notify their sinks."""
        overwrite = self.members[0].is_first_grad()
        for member in self.members[1:]:
            assert member.is_first_grad() == overwrite, "members are used together"
        main_grads = self._main_grads.now()
        for matrix, rows in zip(main_grads.views, main_grads.rows, strict=True):
            yield matrix, rows, overwrite
        for member in self.members:
            member.grad_was_added()


class _MergedViews:
    """Views of parameters' tensors as matrices of one width (None: vectors), memory neighbours joined; kept for the same tensors.

    Args:
        members: the parameters.
        name: of the tensor, an attribute of each.
        width: of the matrices.

    Attributes:
        views, transposes: the matrices [rows, in] and [in, rows], after `now`.
        rows: theirs, of W.
    """

    def __init__(self, members: Sequence[ShardedParameter], name: str, width: int | None) -> None:
        self._members = members
        self._name = name
        self._width = width
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
        first, self.rows = 0, []
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
