"""Computes a linear layer's GEMMs with FP8 operands (`products.py` defines the three products).

With one scale per tensor, the scale follows from the tensor's largest absolute value over cp, and over tp if the tensor is cut. So
all layouts have the same scales. Small all-reduces compute the maximum: for X and dY in each microbatch, for the weight once a
step. X is saved as FP8 values, 1 byte each, if nothing else saves X.

With block scales, there is no all-reduce, because no block is cut. X is saved in the run's dtype, because X and X^T are rounded
differently.

With `precision.fp8.gather: fp8`, sequence parallelism rounds X (column-parallel) or dY (row-parallel) before the gather. The
maximum is then reduced over tp as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch

from triaxis.engine.activations.saved_tensors import SavedTensors
from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import FP8_SCALES
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.tree import Config
from triaxis.engine.kernels.fp8.products import Fp8
from triaxis.engine.kernels.fp8.recipes import E4M3, Fp8Format, Quantised, TensorScale, from_bytes, is_bytes
from triaxis.engine.kernels.registry import Kernels
from triaxis.engine.linear.products import LinearForm, LinearGemms, LinearParts, Operand
from triaxis.engine.tensor_parallel.mappings import TensorParallelRegion

Scale = TensorScale | None
"""A tensor's one FP8 scale; None if each block has a scale."""


@dataclass(frozen=True, slots=True)
class Fp8Form(LinearForm):
    """The form that builds a layer's products as GEMMs with FP8 operands.

    Attributes:
        fp8: recipe and backend.
        tp: the tp axis.
        cp: the cp axis.
        once: function (compute) that calls `compute` in the forward; in the layer's recomputation it returns the same result.
        makes_again: function (name in `recompute.modules`) -> whether the current layer recomputes that module in the backward.
        sends: whether sequence parallelism gathers FP8 bytes (`precision.fp8.gather`).
        alone_without: module names (`recompute.modules`). If the run recomputes none of these, only this layer saves its input X.
            None: another layer always saves X.
        copies_stay: whether the weights' FP8 copies keep their addresses, as CUDA graphs need.
    """

    fp8: Fp8
    tp: Axis
    cp: Axis
    once: Callable[[Callable[[], Scale]], Scale]
    makes_again: Callable[[str], bool]
    sends: bool = False
    alone_without: tuple[str, ...] | None = None
    copies_stay: bool = False

    @classmethod
    def of(cls, kernels: Kernels, config: Config, topology: Topology, saved: SavedTensors) -> "Fp8Form | None":
        """Build a run's `Fp8Form`, None without FP8; `saved` decides which tensors the rank's chunks save."""
        fp8 = kernels.fp8
        if fp8 is None:
            return None
        asked = config.precision.fp8
        sends = asked is not None and asked.gather == "fp8"
        axes = topology.axis("tp"), topology.axis("cp")
        copies_stay = kernels.choices.graphs == "on"
        return cls(fp8, *axes, saved.once, saved.makes_again, sends, copies_stay=copies_stay)

    def alone(self, *parts: str) -> LinearForm:
        return replace(self, alone_without=parts)

    def gemms(self, parts: LinearParts) -> LinearGemms:
        return Fp8Gemms(parts, self)


_NONE_YET = object()


class Fp8Gemms(LinearGemms):
    """One layer's GEMMs with FP8 operands.

    The weights' FP8 copies W [out, in] and W^T [in, out] are computed once after each weight change.
    """

    def __init__(self, parts: LinearParts, form: Fp8Form) -> None:
        super().__init__(parts)
        self.form = form
        self.parts = parts
        self._version: object = _NONE_YET
        self._copies: list[tuple[Quantised, Quantised]] = []

    def enter(self, x: torch.Tensor, region: TensorParallelRegion, purpose: str) -> tuple[Operand, torch.Tensor]:
        if self._sends(region):
            # Every rank rounds its shard before the gather, so the maximum must cover the shards of all tp ranks.
            scale = self._input_scale(x, is_cut=True)
            sent = self._as_bytes(x, scale)
            whole = region.enter(sent, purpose).wait()
            return Operand(whole, scale), region.kept(sent if self._is_stored() else x, whole)
        whole = region.enter(x, purpose).wait()
        if whole is x:
            inputs = self.whole_input(x)
            return inputs, inputs.tensor
        scale = self._input_scale(whole, is_cut=self.parts.cuts_inputs)
        if region.keeps_gathered and self.form.fp8.recipe.is_tensorwise:
            # The gathered copy belongs to this layer, whoever saves x, so the layer can keep it as bytes.
            whole = self._as_bytes(whole, scale)
        return Operand(whole, scale), region.kept(x, whole)

    def enter_again(self, kept: Operand, region: TensorParallelRegion, purpose: str) -> Pending:
        tensor = kept.tensor
        if self._sends(region) and not is_bytes(tensor):
            # X was saved in the run's dtype; the forward's scale rounds it to the same bytes.
            tensor = _bytes_of(self.form.fp8.activation(tensor.flatten(0, -2), kept.scale), tensor.shape)
        return region.enter_again(tensor, purpose)

    def leave_backward(self, grad: torch.Tensor, region: TensorParallelRegion, purpose: str) -> tuple[Pending, Operand]:
        if not self._sends(region):
            return super().leave_backward(grad, region, purpose)
        scale = self._scale([grad], "gradient", self.form.fp8.recipe.gradient, over_tp=True, over_cp=True)
        sent = _bytes_of(self.form.fp8.gradient(grad.flatten(0, -2), scale), grad.shape)
        return region.leave_backward(sent, purpose), Operand(sent, scale)

    def whole_input(self, x: torch.Tensor) -> Operand:
        """Compute the scale for an X that needs no gather. Round X to FP8 if only this layer saves it.

        If another layer saves X too, `forward` rounds X. With block scales, `forward` always does, and the scale is None.
        """
        scale = self._input_scale(x, is_cut=self.parts.cuts_inputs)
        return Operand(self._as_bytes(x, scale) if self._is_stored() else x, scale)

    def whole_grad(self, grad: Operand, *, defers: bool) -> Operand:
        if grad.scale is not None:
            return grad
        fp8 = self.form.fp8
        scale = self._scale(
            [grad.tensor], "gradient", fp8.recipe.gradient, over_tp=self.parts.cuts_outputs, over_cp=True
        )
        if scale is None or defers:
            return Operand(grad.tensor, scale)
        rounded, transposed = fp8.gradient_both_ways(grad.tensor.flatten(0, -2), scale)
        return Operand(grad.tensor, scale, (rounded.view(torch.uint8), transposed.view(torch.uint8)))

    def forward(self, x: Operand) -> torch.Tensor:
        inputs = self._input(x.tensor.flatten(0, -2), x.scale)
        copies = zip(self.copies(), self.vectors(), strict=False)
        product = partial(self.form.fp8.product, inputs, dtype=self._dtype, in_forward=True)
        outputs = [product(weight, bias) for (weight, _), bias in copies]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)).unflatten(0, x.tensor.shape[:-1])

    def input_grad(self, grad: Operand) -> torch.Tensor:
        copies = self.copies()
        whole = grad.tensor.flatten(0, -2) if grad.rounded is None else grad.rounded[0]
        parts = whole.split([weight.values.shape[0] for weight, _ in copies], dim=-1)
        total = None
        for part, (_, transposed) in zip(parts, copies, strict=True):
            product = self.form.fp8.product(self._gradient(part, grad.scale), transposed, None, self._dtype)
            total = product if total is None else total.add_(product)
        assert total is not None
        return total.unflatten(0, grad.tensor.shape[:-1])

    def add_products(self, grad: Operand, x: Operand) -> torch.Tensor | None:
        fp8, inputs = self.form.fp8, self._input(x.tensor.flatten(0, -2).t(), x.scale)

        def add(main_grad: torch.Tensor, part: torch.Tensor, inputs: Quantised, *, overwrite: bool) -> None:
            fp8.add_product(main_grad, self._gradient(part.t(), grad.scale), inputs, self._dtype, overwrite=overwrite)

        whole = grad.tensor.flatten(0, -2) if grad.rounded is None else grad.rounded[1].t()
        self.weights.accumulate(whole, inputs, add)
        return None

    def copies(self) -> list[tuple[Quantised, Quantised]]:
        """Quantise W and W^T, matrix by matrix; the copies are reused until the weights change."""
        matrices, version = self.weights.complete().views, self.weights.version()
        if version != self._version:
            scale = self._scale(matrices, "weight", E4M3, over_tp=True, over_cp=False)
            copies = [self.form.fp8.weight_both_ways(each, scale) for each in matrices]
            if self._copies and self.form.copies_stay:
                for old, new in zip(chain(*self._copies), chain(*copies), strict=True):
                    old.write(new)
            else:
                self._copies = copies
            self._version = version
        return self._copies

    @property
    def _dtype(self) -> torch.dtype:
        return self.weights.members[0].value.dtype

    def _sends(self, region: TensorParallelRegion) -> bool:
        return self.form.sends and region.gathers

    def _is_stored(self) -> bool:
        """Test whether the layer saves its input X in FP8.

        It does if FP8 has one scale per tensor (no block scales) and nothing else saves X.
        """
        parts = self.form.alone_without
        is_alone = parts is not None and not any(map(self.form.makes_again, parts))
        return is_alone and self.form.fp8.recipe.is_tensorwise

    def _input_scale(self, x: torch.Tensor, *, is_cut: bool) -> Scale:
        return self.form.once(lambda: self._scale([x], "input", E4M3, over_tp=is_cut, over_cp=True))

    def _input(self, matrix: torch.Tensor, scale: Scale) -> Quantised:
        """Convert X or X^T to an FP8 GEMM operand. `matrix` has the run's dtype or FP8 bytes."""
        return from_bytes(matrix, E4M3, scale) if is_bytes(matrix) else self.form.fp8.activation(matrix, scale)

    def _gradient(self, matrix: torch.Tensor, scale: Scale) -> Quantised:
        """Convert columns of dY to an FP8 GEMM operand. `matrix` has the run's dtype or FP8 bytes."""
        fp8 = self.form.fp8
        return from_bytes(matrix, fp8.recipe.gradient, scale) if is_bytes(matrix) else fp8.gradient(matrix, scale)

    def _as_bytes(self, x: torch.Tensor, scale: Scale) -> torch.Tensor:
        """Convert X [.., in] to FP8 bytes."""
        return _bytes_of(self.form.fp8.activation(x.flatten(0, -2), scale), x.shape)

    def _scale(
        self, parts: Sequence[torch.Tensor], what: str, into: Fp8Format, *, over_tp: bool, over_cp: bool
    ) -> Scale:
        """Compute the scale of a tensor from this rank's parts. `over_tp` and `over_cp` include the other ranks' parts.

        With block scales the result is None.
        """
        fp8 = self.form.fp8
        if not fp8.recipe.is_tensorwise:
            return None

        def maximum(axis: Axis, largest: torch.Tensor) -> torch.Tensor:
            return axis.all_reduce(largest, f"{FP8_SCALES} {self.parts.name} {what}", op="max").wait()

        # Without a message, one kernel computes the maximum and the factor that follows from it.
        axes = [
            axis for axis, is_over in ((self.form.tp, over_tp), (self.form.cp, over_cp)) if is_over and axis.size > 1
        ]
        return fp8.scale(parts, into, [partial(maximum, axis) for axis in axes])


def _bytes_of(rounded: Quantised, shape: torch.Size) -> torch.Tensor:
    """View a quantised matrix [n, columns] as bytes [.., columns]."""
    return rounded.values.view(torch.uint8).view(shape)
