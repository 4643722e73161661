"""Computes a linear layer's three products with its weights.

    forward           Y  = X W^T (+ bias)
    input gradient    dX = dY W
    weight gradient   dW += dY^T X

A column-parallel layer has the whole X [n, in], gathered over the sequence, and this rank's columns of dY [n, out]. A row-parallel
layer has this rank's columns of X, and the whole dY. A `LinearForm` selects the implementation: torch in the run's dtype (here),
FP8 (`fp8_gemms.py`), or Transformer Engine (`te_gemms.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch

from triaxis.engine.comm.backends import Pending
from triaxis.engine.kernels.bias_total import total_of
from triaxis.engine.kernels.fp8.recipes import TensorScale
from triaxis.engine.kernels.weight_grad import WeightGradKernel, add, add_matmul
from triaxis.engine.tensor_parallel.mappings import TensorParallelRegion
from triaxis.engine.tensor_parallel.parameter import ShardedParameter

AddProduct = Callable[..., object]
"""A function that takes (main grad [rows, in], dY [n, rows], X [n, in], *, overwrite) and adds dY^T X to the main grad.

If `overwrite`, the product replaces the main grad."""


class Operand(NamedTuple):
    """X or dY, as a layer's products read it.

    Attributes:
        tensor: [.., columns] in the run's dtype, or FP8 values as bytes.
        scale: the tensor's one FP8 scale. None if the products do not use FP8, or if each block has its own scale.
        rounded: dY [n, out] and dY^T [out, n] as FP8 bytes, if one pass made both; None: each product rounds what it reads.
    """

    tensor: torch.Tensor
    scale: TensorScale | None = None
    rounded: tuple[torch.Tensor, torch.Tensor] | None = None


class FusedWeights:
    """Weights that read one input, stacked by rows.

    W = [W_1; W_2; ..] with W_i [rows_i, in]. All members get their gradients at the same time. Members that are neighbours in the
    flat tensor share one GEMM, without a copy. Query and key/value weights are neighbours unless the key/value heads are
    replicated.

    As separate parameters, members can be cut, summed and saved differently.

    Attributes:
        values: the members' weights as `Matrices`; `complete` brings them up to date.
        all_rows: slice over all rows in W.
    """

    def __init__(self, members: Sequence[ShardedParameter], in_features: int | None) -> None:
        """Take the parameters to stack (`members`) and their number of columns, None for biases (vectors)."""
        self.members = tuple(members)
        self.values = Matrices(self.members, "value", in_features)
        self._main_grads = Matrices(self.members, "main_grad", in_features)
        self.all_rows = slice(0, sum(member.record.numel for member in self.members) // (in_features or 1))

    def version(self) -> int | None:
        """Compute a number that changes whenever the weights do. None if the parameters are in no bucket."""
        if self.members[0].bucket is None:
            return None
        return sum(member.bucket.version for member in self.members if member.bucket is not None)

    def complete(self) -> "Matrices":
        """Complete the weights by their all-gathers, and return them as matrices [rows, in] (biases: vectors [rows])."""
        for member in self.members:
            bucket = member.bucket
            if bucket is not None and not bucket.is_complete:
                bucket.complete()
        return self.values.now()

    def accumulate(self, grad: torch.Tensor, x: Any, add: AddProduct) -> None:
        """Add a gradient to the main grads, one call of `add` per matrix. Each parameter's bucket counts it.

        A step's first gradient replaces the main grads. If ZeRO-2 or 3 shards them, each microbatch's first gradient does. `grad`
        is dY [n, out]; `x` is X [n, in], in a form that `add` reads. For biases, `grad` [out] is the gradient itself.
        """
        buckets = [member.bucket for member in self.members if member.bucket is not None]
        assert len(buckets) == len(self.members), f"{self.members[0].record.name} has no grad buffer"
        overwrite, *others = [bucket.overwrites(member) for bucket, member in zip(buckets, self.members, strict=True)]
        assert all(each == overwrite for each in others), "members are used together"
        main_grads = self._main_grads.now()
        for matrix, rows in zip(main_grads.views, main_grads.rows, strict=True):
            add(matrix, grad if rows == self.all_rows else grad[..., rows], x, overwrite=overwrite)
        for bucket, member in zip(buckets, self.members, strict=True):
            bucket.grad_added(member)


class Matrices:
    """Parameter tensors viewed as matrices of one width, with neighbours in memory joined.

    Args:
        members: the parameters.
        name: parameter attribute that holds the tensor (`value` or `main_grad`).
        width: number of columns; None: each tensor is viewed as a vector.

    Attributes:
        views, transposes: the matrices [rows, in] and [in, rows]. Call the method `now` before reading.
        rows: slice of W's rows in each view.
    """

    def __init__(self, members: Sequence[ShardedParameter], name: str, width: int | None) -> None:
        self._members = members
        self._name = name
        self._width = width
        self._bindings: list[int] = []
        self.views: list[torch.Tensor] = []
        self.transposes: list[torch.Tensor] = []
        self.rows: list[slice] = []

    def now(self) -> "Matrices":
        """Rebuild `views` if a parameter has had new tensors bound since the last call. Return this object."""
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
            # Offsets, not addresses: a footprint's tensors have no memory, but must be joined in the same way.
            is_one_storage = last.untyped_storage()._cdata == view.untyped_storage()._cdata
            if is_one_storage and last.storage_offset() + last.numel() == view.storage_offset():
                merged[-1] = torch.as_strided(last, (last.shape[0] + view.shape[0], *last.shape[1:]), last.stride())
            else:
                merged.append(view)
        return merged


class LinearParts(NamedTuple):
    """The layer properties from which its products (see the module) are built.

    Attributes:
        name: the layer's name.
        weights: the weights, which read the same input.
        biases: biases for the same rows, added to Y, or None.
        kernel: kernel for the weight gradients.
        cuts_inputs, cuts_outputs: whether X, and Y, are cut over tp.
        sums_biases: whether the products also add the bias gradients.
        consumer_may_sum: whether the module that reads the output Y can sum dY. It then calls `LinearGemms.add_bias_total`, unless
            the weight-gradient product already sums dY.
    """

    name: str
    weights: FusedWeights
    biases: FusedWeights | None
    kernel: WeightGradKernel
    cuts_inputs: bool
    cuts_outputs: bool
    sums_biases: bool = False
    consumer_may_sum: bool = False


class LinearGemms:
    """One layer's products in the run's dtype.

    Args:
        makes_totals: whether the weight-gradient product returns dY's sum as well.

    Attributes:
        biases_are_summed_by_consumer: whether the consumer of Y computes the bias gradients.
    """

    def __init__(self, parts: LinearParts, *, makes_totals: bool = False) -> None:
        self.weights = parts.weights
        self.biases = parts.biases
        has_sums = parts.biases is not None and parts.sums_biases
        self.makes_totals = has_sums and makes_totals
        self.biases_are_summed_by_consumer = has_sums and parts.consumer_may_sum and not makes_totals
        self._sums_biases = has_sums and not self.biases_are_summed_by_consumer
        self._add = partial(add_matmul, kernel=parts.kernel)

    def enter(self, x: torch.Tensor, region: TensorParallelRegion, purpose: str) -> tuple[Operand, torch.Tensor]:
        """Gather a column-parallel layer's X [s (/t), b, in], if sequence parallelism has sharded X.

        Returns:
            X [s, b, in], and the tensor to save for `enter_again`.
        """
        whole = region.enter(x, purpose).wait()
        return Operand(whole), region.kept(x, whole)

    def enter_again(self, kept: Operand, region: TensorParallelRegion, purpose: str) -> Pending:
        """Restore X [s, b, in] as `forward` read it, from the saved operand."""
        return region.enter_again(kept.tensor, purpose)

    def leave_backward(self, grad: torch.Tensor, region: TensorParallelRegion, purpose: str) -> tuple[Pending, Operand]:
        """Post the all-gather of a row-parallel layer's dY [s (/t), b, out], if dY is sharded.

        Returns:
            dY [s, b, out] in flight, and the operand from which a deferred weight gradient gathers dY again.
        """
        return region.leave_backward(grad, purpose), Operand(grad)

    def whole_input(self, x: torch.Tensor) -> Operand:
        """Wrap X [.., in] as an `Operand`, when X needs no gather. Subclasses may add a scale."""
        return Operand(x)

    def whole_grad(self, grad: Operand, *, defers: bool) -> Operand:
        """Return a whole dY [.., out] with what `input_grad` and `add_weight_grads` need in FP8 (here nothing).

        Args:
            defers: whether `add_weight_grads` comes later, for which dY alone is kept.
        """
        return grad

    def forward(self, x: Operand) -> torch.Tensor:
        """Compute Y [.., out] = X W^T + bias from X [.., in]."""
        tensor = x.tensor
        rows = tensor.view(-1, tensor.shape[-1])
        matrices = self.weights.complete().transposes
        outputs = [
            torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)
            for matrix, bias in zip(matrices, self.vectors(), strict=False)
        ]
        whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return whole.view(*tensor.shape[:-1], whole.shape[-1])

    def input_grad(self, grad: Operand) -> torch.Tensor:
        """Compute dX [.., in] = dY W from dY [.., out]."""
        matrices, tensor = self.weights.complete().views, grad.tensor
        rows = tensor.view(-1, tensor.shape[-1])
        parts = [rows] if len(matrices) == 1 else rows.split([matrix.shape[0] for matrix in matrices], dim=-1)
        total = torch.mm(parts[0], matrices[0])
        for part, matrix in zip(parts[1:], matrices[1:], strict=True):
            total += torch.mm(part, matrix)
        return total.view(*tensor.shape[:-1], total.shape[-1])

    def add_weight_grads(self, grad: Operand, x: Operand) -> None:
        """Add dY^T X to the main grads. The shapes are dY [.., out], X [.., in].

        If `LinearParts.sums_biases`, also add dY's sum over tokens to the biases' main grads. Skip this if the module that reads
        the output Y does so (`biases_are_summed_by_consumer`).
        """
        total = self.add_products(grad, x)
        if self._sums_biases:
            self.add_bias_total(total_of(grad.tensor) if total is None else total)

    def add_bias_total(self, total: torch.Tensor) -> None:
        """Add dY's sum over its tokens, [out] in the accumulation dtype, to the biases' main grads."""
        assert self.biases is not None
        self.biases.accumulate(total, None, _add_total)

    def add_products(self, grad: Operand, x: Operand) -> torch.Tensor | None:
        """Add dY^T X to the weights' main grads.

        Returns:
            dY's sum over the tokens [out] if `makes_totals`, else None.
        """
        rows = grad.tensor.view(-1, grad.tensor.shape[-1])
        self.weights.accumulate(rows, x.tensor.view(-1, x.tensor.shape[-1]), self._add)
        return None

    def vectors(self) -> Iterable[torch.Tensor | None]:
        """List each matrix's bias vector [rows]; without biases, an endless series of None.

        Call `weights.complete` first.
        """
        if self.biases is None:
            return repeat(None)
        vectors, matrices = self.biases.complete(), self.weights.values
        # Biases are joined like their weights, unless only some members are frozen.
        if vectors.rows == matrices.rows:
            return vectors.views
        return torch.cat(vectors.views).split([matrix.shape[0] for matrix in matrices.views])


def _add_total(main_grad: torch.Tensor, total: torch.Tensor, x: None, *, overwrite: bool) -> None:
    add(main_grad, total, overwrite=overwrite)


class LinearForm:
    """Builds each layer's `LinearGemms` in the run's dtype. Subclasses build them in FP8 or with Transformer Engine."""

    def alone(self, *parts: str) -> "LinearForm":
        """Return the form for a layer that alone saves its input X for the backward.

        If the run recomputes one of the modules `parts` (`recompute.modules`), that module also saves or restores X.
        """
        return self

    def gemms(self, parts: LinearParts) -> LinearGemms:
        """Build a layer's products. A layer calls this once, when it is constructed."""
        return LinearGemms(parts)


IN_RUN_DTYPE = LinearForm()
