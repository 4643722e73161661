"""A branch that is added to the residual stream, and the norm that reads the sum: one pass over memory each way where compiled.

    forward    y = x + f branch, n = norm(y)
    backward   dx = dy + (the norm's gradient of y for dn), d branch = f dx

Apart, the norm reads y once more, and autograd adds the two gradients of y in a pass of its own. The backward needs y and the
statistics of the norm, as the norm alone does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from triaxis.engine.kernels.elementwise import (
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_backward_in_place,
    rms_norm_forward,
)
from triaxis.engine.kernels.fusion import Fusion

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class NormFunctions:
    """The pure functions of a norm over the last dim.

    Attributes:
        forward: (x [.., h], eps, weights [h]) -> output and statistics.
        backward: (x, grad [.., h], weights and statistics) -> gradients of x and of each weight. Ours leave the weights' in the
            accumulation dtype, that of the sums.
    """

    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]


def _layer_norm(x: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor) -> Tensors:
    return layer_norm_forward(x, weight, bias, eps)


def _layer_norm_back(
    x: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    r: torch.Tensor,
) -> Tensors:
    return layer_norm_backward(x, weight, mean, r, grad, r.dtype)


def _torch_layer_norm(x: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor) -> Tensors:
    return torch.native_layer_norm(x, weight.shape, weight, bias, eps)


def _torch_layer_norm_back(
    x: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    r: torch.Tensor,
) -> Tensors:
    return torch.ops.aten.native_layer_norm_backward(grad, x, weight.shape, mean, r, weight, bias, [True] * 3)


def _rms_norm(x: torch.Tensor, eps: float, weight: torch.Tensor) -> Tensors:
    return rms_norm_forward(x, weight, eps, 0)


def _rms_norm_back(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, r: torch.Tensor) -> Tensors:
    return rms_norm_backward(x, weight, r, grad, 0, r.dtype)


def _rms_norm_back_in_place(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, r: torch.Tensor) -> Tensors:
    return rms_norm_backward_in_place(x, weight, r, grad, 0, r.dtype)


def _rms_norm_1p(x: torch.Tensor, eps: float, weight: torch.Tensor) -> Tensors:
    return rms_norm_forward(x, weight, eps, 1)


def _rms_norm_1p_back(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, r: torch.Tensor) -> Tensors:
    return rms_norm_backward(x, weight, r, grad, 1, r.dtype)


def _rms_norm_1p_back_in_place(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, r: torch.Tensor) -> Tensors:
    return rms_norm_backward_in_place(x, weight, r, grad, 1, r.dtype)


def _torch_rms_norm(x: torch.Tensor, eps: float, weight: torch.Tensor) -> Tensors:
    return torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)


def _torch_rms_norm_back(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, r: torch.Tensor) -> Tensors:
    return torch.ops.aten._fused_rms_norm_backward(grad, x, weight.shape, r, weight, [True, True])


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
        "rmsnorm": NormFunctions(_rms_norm, _rms_norm_back_in_place),
        "rmsnorm_1p": NormFunctions(_rms_norm_1p, _rms_norm_1p_back_in_place),
    }
)
_TORCH_RMS_NORM = NormFunctions(_torch_rms_norm, _torch_rms_norm_back)


def norm_functions(name: str, fusion: Fusion, *, is_cuda: bool) -> NormFunctions:
    """Return the functions of a norm: torch's own kernels where nothing is compiled and torch has them, as `elementwise.norm`.

    Raises:
        KeyError: no kernel has this name.
    """
    if fusion.is_compiled:
        return _COMPILED[name]
    return _TORCH_RMS_NORM if name == "rmsnorm" and is_cuda else _EAGER[name]


def add_and_norm(
    forward: Callable[..., Tensors],
    x: torch.Tensor,
    branch: torch.Tensor,
    factor: float,
    eps: float,
    *weights: torch.Tensor,
) -> Tensors:
    """Return y = x + factor branch, its norm and the norm's statistics; x, branch [.., h]. A function for `Fusion`."""
    y = torch.add(x, branch, alpha=factor)
    return y, *forward(y, eps, *weights)


def add_and_norm_backward(
    backward: Callable[..., Tensors],
    y: torch.Tensor,
    grad_y: torch.Tensor,
    grad: torch.Tensor,
    factor: float,
    *weights_and_statistics: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, *Tensors]:
    """Return the gradients of x, of the branch (None: that of x) and of each weight, from those of y and of the norm's output.

    A function for `Fusion`. Operator by operator the addition is in place, in the tensor that the norm's backward has made.
    """
    grad_x, *grads = backward(y, grad, *weights_and_statistics)
    grad_x = grad_x.add_(grad_y)
    return grad_x, None if factor == 1 else grad_x * factor, *grads
