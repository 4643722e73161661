"""Computes norms over the last dim, of a tensor alone or of a sum.

    alone      n = norm(x)
    of a sum   y = x + f branch, n = norm(y), where the factor f scales an addition to the residual stream x
    backward   dx = dy + (the norm's gradient for y from dn), d branch = f dx

Arithmetic is in the accumulation dtype, results are in the input's dtype. Each form has an explicit backward, and saves x (or y)
and the norm's statistics. Compiled, a sum and its norm take one pass over memory in each direction.

In eager mode, LayerNorm uses torch's own kernels everywhere, RMSNorm only on a GPU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from triaxis.engine.kernels.fusion import Fusion
from triaxis.engine.numerics.precision import accumulate

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class NormFunctions:
    """A norm's pure functions over the last dim.

    Attributes:
        forward: function (x [.., h], eps, weights [h]) -> output, and per-token statistics.
        backward: function (x, grad [.., h], dtype, weights and statistics) -> gradient for x, and for each weight in `dtype`
            (torch's own kernels use the weights' dtype).
    """

    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]


class NormKernel:
    """A norm as a model calls it, with its eps, eager or compiled.

    Args:
        name: norm's name in `triaxis.engine.config.values.model_choices.NORMS`.
        eps: constant added to the variance or mean square.
        fusion: wrapper that compiles the norm's forward and backward, or leaves them eager.

    Raises:
        KeyError: no kernel has this name.
    """

    def __init__(self, name: str, eps: float, fusion: Fusion) -> None:
        functions = (_COMPILED if fusion.is_compiled else _EAGER)[name]
        self.eps = eps
        self.forward, self.backward = fusion(functions.forward), fusion(functions.backward)
        self.add_and_norm = partial(fusion(add_and_norm), functions.forward)
        self.add_and_norm_backward = partial(fusion(add_and_norm_backward), functions.backward)

    def __call__(self, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """Normalise x [.., h]; weights [h] are in `layer_kinds.Norm.parameters` order."""
        return _Normalised.apply(x, self, *weights)


class _Normalised(torch.autograd.Function):
    """Autograd function for a norm without an addition. It saves x, the weights and the statistics."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kernel: NormKernel, *weights: torch.Tensor) -> torch.Tensor:
        normalised, *statistics = kernel.forward(x, kernel.eps, *weights)
        ctx.kernel = kernel
        ctx.save_for_backward(x, *weights, *statistics)
        return normalised

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, *others = ctx.saved_tensors
        grad_x, *grads = ctx.kernel.backward(x, grad, weight.dtype, weight, *others)
        return grad_x, None, *grads


def add_and_norm(
    forward: Callable[..., Tensors],
    x: torch.Tensor,
    branch: torch.Tensor,
    factor: float,
    eps: float,
    *weights: torch.Tensor,
) -> Tensors:
    """Compute y = x + factor branch, its norm and the norm's statistics.

    x and branch are [.., h]. `Fusion` can compile this function.
    """
    y = torch.add(x, branch, alpha=factor)
    return y, *forward(y, eps, *weights)


def add_and_norm_backward(
    backward: Callable[..., Tensors],
    y: torch.Tensor,
    grad_y: torch.Tensor,
    grad: torch.Tensor,
    factor: float,
    of_weights: torch.dtype,
    *weights_and_statistics: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, *Tensors]:
    """Compute the gradients for x, the branch (None if equal to x's) and each weight.

    The forward is `add_and_norm`: y = x + factor branch, then the norm of y. `Fusion` can compile this function.

    Args:
        grad_y, grad: gradients for y and for the norm's output.
    """
    grad_x, *grads = backward(y, grad, of_weights, *weights_and_statistics)
    grad_x = grad_x.add_(grad_y)
    return grad_x, None if factor == 1 else grad_x * factor, *grads


def _layer_norm(x: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor) -> Tensors:
    """Compute y = n w + b (1607.06450), and return y, the mean and r. n = (x - mean) r and r = 1 / sqrt(variance + eps)."""
    wide = accumulate(x)
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    r = centred.square().mean(-1, keepdim=True).add(eps).rsqrt()
    return (centred * r * weight + bias).to(x.dtype), mean, r


def _layer_norm_back(
    x: torch.Tensor,
    grad: torch.Tensor,
    of_weights: torch.dtype,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    r: torch.Tensor,
) -> Tensors:
    """Compute dx = r (dy w - mean(dy w) - n mean(dy w n)), dw = sum_tokens dy n, db = sum_tokens dy.

    Here n = (x - mean) r.
    """
    n = (accumulate(x) - mean) * r
    wide = accumulate(grad)
    grad_weight, grad_bias = (each.flatten(0, -2).sum(0) for each in (wide * n, wide))
    scaled = wide * weight
    grad_x = (scaled - scaled.mean(-1, keepdim=True) - n * (scaled * n).mean(-1, keepdim=True)) * r
    return grad_x.to(x.dtype), grad_weight.to(of_weights), grad_bias.to(of_weights)


def _torch_layer_norm(x: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor) -> Tensors:
    return torch.native_layer_norm(x, weight.shape, weight, bias, eps)


def _torch_layer_norm_back(
    x: torch.Tensor,
    grad: torch.Tensor,
    of_weights: torch.dtype,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    r: torch.Tensor,
) -> Tensors:
    return torch.ops.aten.native_layer_norm_backward(grad, x, weight.shape, mean, r, weight, bias, [True] * 3)


def _gains(weight: torch.Tensor, offset: int) -> torch.Tensor:
    return accumulate(weight) + offset if offset else weight


def _rms_norm(x: torch.Tensor, eps: float, weight: torch.Tensor, offset: int = 0) -> Tensors:
    """Compute y = n g (1910.07467), and return y and r. n = x r, r = 1 / sqrt(mean(x^2) + eps), and gains g = offset + w."""
    wide = accumulate(x)
    r = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * r).mul_(_gains(weight, offset)).to(x.dtype), r


def _rms_norm_back(
    x: torch.Tensor,
    grad: torch.Tensor,
    of_weight: torch.dtype,
    weight: torch.Tensor,
    r: torch.Tensor,
    offset: int = 0,
) -> Tensors:
    """Compute dx = r (dy g - n mean(dy g n)), dw = sum_tokens dy n, where n = x r, g the gains."""
    n = accumulate(x) * r
    wide = accumulate(grad)
    scaled = wide * _gains(weight, offset)
    grad_x = (scaled - n * (scaled * n).mean(-1, keepdim=True)) * r
    return grad_x.to(x.dtype), (wide * n).flatten(0, -2).sum(0).to(of_weight)


def _rms_norm_back_in_place(
    x: torch.Tensor,
    grad: torch.Tensor,
    of_weight: torch.dtype,
    weight: torch.Tensor,
    r: torch.Tensor,
    offset: int = 0,
) -> Tensors:
    """Compute `_rms_norm_back` in eager mode with few passes over memory, overwriting its own temporaries.

    `of_weight` is the weight gradient's dtype.
    """
    gains = _gains(weight, offset)
    n = accumulate(x) * r
    products = (n * grad).flatten(0, -2)
    grad_weight = products.sum(0)
    # `products` is already n dy, so multiplying it by the gains gives -mean(dy g n).
    minus_mean = products.mv(accumulate(gains)).div_(-x.shape[-1]).view(r.shape)
    del products
    grad_x = n.mul_(minus_mean).add_(accumulate(grad) * gains).mul_(r)
    return grad_x.to(x.dtype), grad_weight.to(of_weight)


def _rms_norm_of_device(x: torch.Tensor, eps: float, weight: torch.Tensor) -> Tensors:
    """Compute `_rms_norm`; on CUDA use torch's kernel, which no other device has."""
    if x.is_cuda:
        return torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
    return _rms_norm(x, eps, weight)


def _rms_norm_back_of_device(
    x: torch.Tensor, grad: torch.Tensor, of_weight: torch.dtype, weight: torch.Tensor, r: torch.Tensor
) -> Tensors:
    if x.is_cuda:
        return torch.ops.aten._fused_rms_norm_backward(grad, x, weight.shape, r, weight, [True, True])
    return _rms_norm_back_in_place(x, grad, of_weight, weight, r)


def _rms_norm_1p(x: torch.Tensor, eps: float, weight: torch.Tensor) -> Tensors:
    """Compute RMSNorm with gains 1 + weight, as in Gemma (transformers' `Gemma2RMSNorm`).

    The sum and the product are in the accumulation dtype and rounded once.
    """
    return _rms_norm(x, eps, weight, offset=1)


def _rms_norm_1p_back(
    x: torch.Tensor, grad: torch.Tensor, of_weight: torch.dtype, weight: torch.Tensor, r: torch.Tensor
) -> Tensors:
    return _rms_norm_back(x, grad, of_weight, weight, r, offset=1)


def _rms_norm_1p_back_in_place(
    x: torch.Tensor, grad: torch.Tensor, of_weight: torch.dtype, weight: torch.Tensor, r: torch.Tensor
) -> Tensors:
    return _rms_norm_back_in_place(x, grad, of_weight, weight, r, offset=1)


_COMPILED: Mapping[str, NormFunctions] = MappingProxyType(
    {
        "layernorm": NormFunctions(_layer_norm, _layer_norm_back),
        "rmsnorm": NormFunctions(_rms_norm, _rms_norm_back),
        "rmsnorm_1p": NormFunctions(_rms_norm_1p, _rms_norm_1p_back),
    }
)
_EAGER: Mapping[str, NormFunctions] = MappingProxyType(
    {
        "layernorm": NormFunctions(_torch_layer_norm, _torch_layer_norm_back),
        "rmsnorm": NormFunctions(_rms_norm_of_device, _rms_norm_back_of_device),
        "rmsnorm_1p": NormFunctions(_rms_norm_1p, _rms_norm_1p_back_in_place),
    }
)
