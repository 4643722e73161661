"""Products of quantised matrices, A B^T, by the backend of `precision.fp8`.

    torch      torch's scaled GEMM (cuBLAS on GPUs from Ada and Hopper on; oneDNN or a plain loop on CPUs): fp32 sums
    emulated   plain operators on the rounded numbers, in the accumulation dtype, on any device: the reference of the others

The emulation multiplies what a backend multiplies: FP8 numbers are exact in the wider dtype, and so are scales of powers of two. A
scale of a whole tensor is applied to the sums, as a GEMM's epilogue does.
"""

from dataclasses import dataclass
from typing import Any

import torch

from engine.config.fp8 import TILE, Fp8Backend, Fp8Config
from engine.errors import ConfigError
from engine.kernels.fp8.recipes import E4M3, RECIPES, Quantised, Recipe, quantise
from engine.numerics.precision import accumulation_dtype

FIRST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with FP8 GEMMs (Ada; Hopper is 9.0)."""


@dataclass(frozen=True, slots=True)
class Fp8:
    """The FP8 of a run: its recipe, and what multiplies."""

    recipe: Recipe
    backend: Fp8Backend

    def activation(self, x: torch.Tensor, largest: torch.Tensor | None) -> Quantised:
        """Quantise inputs [n, in], or X^T [in, n]; `largest` is the whole tensor's absolute value, where one scale serves it."""
        recipe = self.recipe
        return quantise(x, E4M3, recipe.activation_block, has_powers=recipe.has_powers, largest=largest)

    def gradient(self, grad: torch.Tensor, largest: torch.Tensor | None) -> Quantised:
        """Quantise gradients of outputs, [n, out] or dY^T [out, n]."""
        recipe = self.recipe
        return quantise(grad, recipe.gradient, recipe.activation_block, has_powers=recipe.has_powers, largest=largest)

    def weight(self, matrix: torch.Tensor, largest: torch.Tensor | None) -> Quantised:
        """Quantise a weight [out, in], or W^T [in, out]."""
        recipe = self.recipe
        return quantise(matrix, E4M3, recipe.weight_block, has_powers=recipe.has_powers, largest=largest)

    def product(self, a: Quantised, b: Quantised, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Compute A B^T + bias: a [m, k], b [n, k], bias [n] -> [m, n] in `dtype`, from sums in its accumulation dtype."""
        if self.backend == "emulated":
            return emulated_product(a, b, bias, dtype)
        return scaled_product(a, b, bias, dtype)


def emulated_product(a: Quantised, b: Quantised, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Compute A B^T + bias in plain operators."""
    wide = accumulation_dtype(dtype)
    if a.inverse.numel() == b.inverse.numel() == 1:
        product = (a.values.to(wide) @ b.values.to(wide).t()) * (a.inverse.to(wide) * b.inverse.to(wide))
    else:
        product = a.dequantised(wide) @ b.dequantised(wide).t()
    return (product if bias is None else product + bias.to(wide)).to(dtype)


def scaled_product(a: Quantised, b: Quantised, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Compute A B^T + bias by torch's scaled GEMM; both have one scale."""
    values = a.values.contiguous(), b.values.contiguous().t()
    scales = a.inverse.view(()), b.inverse.view(())
    return torch.ops.aten._scaled_mm(*values, *scales, bias=bias, out_dtype=dtype)


def open_fp8(config: Fp8Config | None, dtype: torch.dtype, device: torch.device) -> Fp8 | None:
    """Return the FP8 of a run, tried on the device; None where it has none.

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
    fp8 = Fp8(RECIPES[config.recipe], backend)
    if problem := _refusal(fp8, config, device, _failure(fp8, dtype, device)):
        raise ConfigError([problem])
    return fp8


def _failure(fp8: Fp8, dtype: torch.dtype, device: torch.device) -> str:
    """Try each product of a layer on small matrices; return torch's reason if one does not run, else ""."""
    if fp8.backend == "emulated":
        return ""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        return f"a GPU of compute capability {major}.{minor} has no FP8; {'.'.join(map(str, FIRST_CAPABILITY))} is the first"
    if not fp8.recipe.is_tensorwise:
        return "no backend but the emulation has scales of blocks yet"
    x = torch.ones(TILE, 2 * TILE, dtype=dtype, device=device)
    try:
        a, b, g = fp8.activation(x, None), fp8.weight(x, None), fp8.gradient(x, None)
        fp8.product(a, b, None, dtype)
        fp8.product(g, b, None, dtype)
        fp8.product(g, a, None, accumulation_dtype(dtype))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return str(error).splitlines()[0].rstrip(".")[:160]
    return ""


def _refusal(fp8: Fp8, config: Fp8Config, device: torch.device, reason: Any) -> str:
    """Return the problem of a backend that does not run on the device; "" if it does."""
    if not reason:
        return ""
    return (
        f"precision.fp8 = {config.recipe} with backend {fp8.backend} does not run on {device.type} here ({reason}). Another "
        "precision would have other speed and other bits than what was asked for. precision.fp8=null trains in precision.dtype; "
        "precision.fp8.backend=emulated gives the numbers of FP8 on any device, slowly."
    )
