"""Multiplies quantised matrices, A B^T, with the backend that `precision.fp8` names.

    torch      torch's scaled GEMM, on GPUs (Ada, Hopper and later) and on CPUs
    te         Transformer Engine's GEMM, which adds weight gradients to the main grads
    emulated   plain operators in the accumulation dtype, on any device, the reference for the others

torch and te sum in fp32, but for the forward with one scale per tensor: there, as in Transformer Engine's own layers, Hopper's
tensor cores keep about 14 bits of a sum (2412.19437, section 3.3.2). torch takes block scales only on GPUs (`block_product.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from triaxis.engine.config.schema.fp8 import BLOCKS, Fp8Backend, Fp8Config
from triaxis.engine.errors import ConfigError
from triaxis.engine.kernels.fp8.block_product import block_product, has_block_gemm
from triaxis.engine.kernels.fp8.recipes import (
    E4M3,
    Fp8Format,
    Quantised,
    Recipe,
    TensorScale,
    amax,
    in_rows,
    inverse_of,
    quantise,
    recipe_of,
    round_both_ways,
    round_by,
    tensor_scale,
)
from triaxis.engine.kernels.fusion import EAGER, Fusion
from triaxis.engine.kernels.te import TransformerEngine, how_to_install, open_te
from triaxis.engine.kernels.trial import failure
from triaxis.engine.kernels.weight_grad import add
from triaxis.engine.numerics.precision import accumulation_dtype

FIRST_CAPABILITY = (8, 9)
"""First compute capability with FP8 GEMMs (Ada; Hopper is 9.0)."""

BLOCK_CAPABILITIES = (((9, 0), (10, 0)), ((10, 0), None))
"""(first compute capability that has the scales, next one that lacks them or None), for 128 x 128 blocks, then for MX blocks."""

_TRIAL_TOLERANCE = 2.0**-7
"""Allowed error per product element, relative to the sum of its terms' absolute values: bf16 results have 8 bits."""


@dataclass(frozen=True, slots=True)
class Fp8:
    """A run's FP8 arithmetic.

    Attributes:
        recipe: formats and scales.
        backend: implementation that computes the products.
        te: Transformer Engine, if it is the backend, else None.
        fusion: runner for the functions other than the products: amax, rounding, transposition.
    """

    recipe: Recipe
    backend: Fp8Backend
    te: TransformerEngine | None = None
    fusion: Fusion = EAGER

    @property
    def label(self) -> str:
        """The backend's name; `te` also has its version."""
        return self.backend if self.te is None else f"te {self.te.version}"

    def activation(self, x: torch.Tensor, scale: TensorScale | None) -> Quantised:
        """Quantise X [n, in] or X^T [in, n] by the whole tensor's scale; None: by scales of the blocks, or of the matrix itself."""
        return self._rounded(x, E4M3, self.recipe.activation_block, scale)

    def gradient(self, grad: torch.Tensor, scale: TensorScale | None) -> Quantised:
        """Quantise output gradients dY [n, out] or dY^T [out, n], as `activation`."""
        return self._rounded(grad, self.recipe.gradient, self.recipe.activation_block, scale)

    def weight(self, matrix: torch.Tensor, scale: TensorScale | None) -> Quantised:
        """Quantise a weight W [out, in] or W^T [in, out], as `activation`."""
        return self._rounded(matrix, E4M3, self.recipe.weight_block, scale)

    def gradient_both_ways(self, grad: torch.Tensor, scale: TensorScale) -> tuple[torch.Tensor, torch.Tensor]:
        """Round output gradients by the tensor's scale. Returns dY [n, out] and dY^T [out, n] as FP8 numbers."""
        return self.fusion(round_both_ways)(grad, scale.largest, self.recipe.gradient)

    def weight_both_ways(self, matrix: torch.Tensor, scale: TensorScale | None) -> tuple[Quantised, Quantised]:
        """Quantise a weight as W [out, in] and as W^T [in, out]."""
        if scale is None:
            return self.weight(matrix, None), self.weight(matrix.t(), None)
        rounded, transposed = self.fusion(round_both_ways)(matrix, scale.largest, E4M3)
        return Quantised(rounded, scale.inverse), Quantised(transposed, scale.inverse)

    def scale(
        self, parts: Sequence[torch.Tensor], into: Fp8Format, maxima: Sequence[Callable[[torch.Tensor], torch.Tensor]]
    ) -> TensorScale:
        """Compute a tensor's one scale.

        Args:
            parts: this rank's parts of the tensor.
            into: the format that it will be rounded to.
            maxima: functions that return the maximum over the ranks of an axis.
        """
        if len(parts) == 1 and not maxima:
            return TensorScale(*self.fusion(tensor_scale)(parts[0], into))
        each = [self.fusion(amax)(part) for part in parts]
        largest = each[0] if len(each) == 1 else torch.stack(each).amax()
        for maximum in maxima:
            largest = maximum(largest)
        return TensorScale(largest, self.fusion(inverse_of)(largest, into))

    def product(
        self,
        a: Quantised,
        b: Quantised,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        in_forward: bool = False,
    ) -> torch.Tensor:
        """Compute A B^T + bias, summed in the accumulation dtype; `in_forward` allows shorter sums (see the module).

        The shapes are a [m, k], b [n, k], bias [n] -> [m, n] in `dtype`.
        """
        if self.backend == "emulated":
            return emulated_product(a, b, bias, dtype)
        a, b = self._in_rows(a), self._in_rows(b)
        is_tensorwise = self.recipe.is_tensorwise
        is_fast = in_forward and is_tensorwise
        if self.te is not None:
            return self.te.fp8_product(a, b, bias, dtype, is_tensorwise=is_tensorwise, is_fast=is_fast)
        # A GEMM with an fp32 result takes no bias, so the bias is added afterwards.
        is_beside = bias is not None and dtype == accumulation_dtype(dtype)
        multiply = partial(scaled_product, is_fast=is_fast) if is_tensorwise else block_product
        product = multiply(a, b, None if is_beside else bias, dtype)
        return product.add_(bias) if is_beside and bias is not None else product

    def add_product(
        self, total: torch.Tensor, a: Quantised, b: Quantised, dtype: torch.dtype, *, overwrite: bool
    ) -> None:
        """Add A B^T to total [m, n], or assign it if `overwrite`.

        The sum is in the accumulation dtype of `dtype`, the run's dtype.
        """
        if self.te is not None:
            a, b = self._in_rows(a), self._in_rows(b)
            self.te.add_fp8_product(total, a, b, overwrite=overwrite, is_tensorwise=self.recipe.is_tensorwise)
        else:
            add(total, self.product(a, b, None, accumulation_dtype(dtype)), overwrite=overwrite)

    def _rounded(
        self, x: torch.Tensor, into: Fp8Format, block: tuple[int, int] | None, scale: TensorScale | None
    ) -> Quantised:
        if scale is None:
            return quantise(x, into, block, has_powers=self.recipe.has_powers, fusion=self.fusion)
        return Quantised(self.fusion(round_by)(x, scale.largest, into), scale.inverse)

    def _in_rows(self, matrix: Quantised) -> Quantised:
        """Return a matrix with contiguous rows, copied if necessary."""
        values = matrix.values
        if values.is_contiguous():
            return matrix
        # Bytes are moved, so one compiled kernel serves every format.
        data = self.fusion(in_rows)(values.view(torch.uint8))
        return Quantised(data.view(values.dtype), matrix.inverse)


def emulated_product(a: Quantised, b: Quantised, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Compute A B^T + bias in plain operators."""
    wide = accumulation_dtype(dtype)
    if a.inverse.numel() == b.inverse.numel() == 1:
        product = (a.values.to(wide) @ b.values.to(wide).t()) * (a.inverse.to(wide) * b.inverse.to(wide))
    else:
        product = a.dequantised(wide) @ b.dequantised(wide).t()
    return (product if bias is None else product + bias.to(wide)).to(dtype)


def scaled_product(
    a: Quantised, b: Quantised, bias: torch.Tensor | None, dtype: torch.dtype, *, is_fast: bool
) -> torch.Tensor:
    """Compute A B^T + bias with torch's scaled GEMM; each operand has one scale and contiguous rows."""
    values = a.values, b.values.t()
    scales = a.inverse.view(()), b.inverse.view(())
    return torch.ops.aten._scaled_mm(*values, *scales, bias=bias, out_dtype=dtype, use_fast_accum=is_fast)


def open_fp8(config: Fp8Config | None, dtype: torch.dtype, device: torch.device) -> Fp8 | None:
    """Build a run's FP8 matrix products, and try them on the device; None without FP8.

    Raises:
        ConfigError: the backend does not run here.
    """
    if config is None:
        return None
    backend: Fp8Backend
    if config.backend != "auto":
        backend = config.backend
    else:
        backend = "emulated" if device.type == "cpu" else "torch"
    recipe = recipe_of(config)
    if reason := _failure(recipe, backend, dtype, device):
        raise ConfigError([_refusal(config, backend, device, reason)])
    return Fp8(recipe, backend, open_te() if backend == "te" else None)


def _failure(recipe: Recipe, backend: Fp8Backend, dtype: torch.dtype, device: torch.device) -> str:
    """Try each of a layer's products on small matrices.

    Returns:
        The reason if a product does not run, else "".
    """
    if backend == "emulated":
        return ""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        return f"{_name_of(device)} has no FP8; {'.'.join(map(str, FIRST_CAPABILITY))} is the first"
    if backend == "torch" and not recipe.is_tensorwise and (reason := _no_blocks(recipe, device)):
        return reason
    return failure(lambda: _try_products(Fp8(recipe, backend, open_te() if backend == "te" else None), dtype, device))


def _no_blocks(recipe: Recipe, device: torch.device) -> str:
    """Explain why torch's GEMM cannot use the recipe's block scales on a device; "" if it can."""
    if not has_block_gemm():
        return f"torch {torch.__version__} has no GEMM with scales of blocks; 2.10 is the first"
    if device.type != "cuda":
        return "torch multiplies matrices with scales of blocks on GPUs alone"
    first, next_without = BLOCK_CAPABILITIES[recipe.weight_block == recipe.activation_block]
    capability = torch.cuda.get_device_capability(device)
    if capability < first or (next_without is not None and capability >= next_without):
        only = "is the first that has" if next_without is None else "alone has"
        return f"{_name_of(device)} has no GEMM with scales of these blocks; {first[0]}.{first[1]} {only}"
    return ""


def _name_of(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"a GPU of compute capability {major}.{minor}"


def _try_products(fp8: Fp8, dtype: torch.dtype, device: torch.device) -> None:
    """Run a layer's three products on small matrices in which every block has a different scale.

    Raises:
        ValueError: a product differs from the emulation by more than rounding.
    """
    side = 2 * BLOCKS["blockwise"]
    places = torch.arange(side, device=device)
    rows, columns = places.unsqueeze(1), places.unsqueeze(0)
    numbers = ((rows * side + columns) * 37 % 101 - 50) / 50.0
    # Neighbouring rows differ by a factor, and so do neighbouring blocks (both sizes) along rows and columns.
    of_rows = rows % 7 + 5 * (rows // BLOCKS["blockwise"])
    x = (numbers * 2.0 ** (of_rows + 2 * (columns // BLOCKS["mxfp8"]))).to(dtype)
    a, w, w_t = fp8.activation(x, None), fp8.weight(x, None), fp8.weight(x.t(), None)
    g, a_t, g_t = fp8.gradient(x, None), fp8.activation(x.t(), None), fp8.gradient(x.t(), None)
    wide = accumulation_dtype(dtype)
    total = torch.zeros(side, side, dtype=wide, device=device)
    fp8.add_product(total, g_t, a_t, dtype, overwrite=True)
    forward = fp8.product(a, w, None, dtype, in_forward=True)
    products = ((forward, a, w), (fp8.product(g, w_t, None, dtype), g, w_t), (total, g_t, a_t))
    for made, left, right in products:
        wanted = emulated_product(left, right, None, wide)
        terms = left.dequantised(wide).abs() @ right.dequantised(wide).abs().t()
        # Tensor cores keep about 14 bits of an FP8 sum, hence a tolerance relative to the terms.
        if not bool(((made.to(wide) - wanted).abs() <= _TRIAL_TOLERANCE * terms).all()):
            raise ValueError("its products are not those of the rounded numbers")


def _refusal(config: Fp8Config, backend: Fp8Backend, device: torch.device, reason: str) -> str:
    """Write the config error for a backend that does not run on the device."""
    return (
        f"precision.fp8 = {config.recipe} with backend {backend} does not run on {device.type} here ({reason}). Another "
        "precision would have other speed and other bits than what was asked for. precision.fp8=null trains in precision.dtype; "
        "precision.fp8.backend=emulated gives the numbers of FP8 on any device, slowly."
        + (f" {how_to_install()}" if backend == "te" else "")
    )
