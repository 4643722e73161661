"""Computes activations in the accumulation dtype, and returns them in the input's dtype.

Each activation has an explicit backward and saves only its input. Autograd would also save copies in the accumulation dtype.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from triaxis.engine.kernels.bias_total import AddTotal, adding, total_of
from triaxis.engine.kernels.fusion import Fusion, Lengths
from triaxis.engine.numerics.precision import accumulate


@dataclass(frozen=True, slots=True)
class _Activation:
    """An activation's forward and backward.

    The forward maps x [.., f] -> [.., f], the backward (x, grad [.., f]) -> gradient for x. If the activation is gated, x is [..,
    2f], [gate | up]. `eager_backward` writes each half of the gradient directly into the result, which a compiled function cannot
    do. If `is_one_operator`, torch's operator runs uncompiled, with its own backward unless a bias gradient is needed.
    """

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    eager_backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    is_one_operator: bool = False


class ActivationKernel:
    """An MLP's nonlinearity.

    The forward maps x [.., f], or [gate | up] [.., 2f] if gated, to [.., f].

    Args:
        name: activation name in the configuration.
        fusion: runner for the forward and the backward.
        add_total: function that the backward calls with the bias gradient, which is x's gradient summed over tokens.
        lengths: input lengths that one compiled kernel accepts (`Fusion`).

    Raises:
        KeyError: no kernel has this name.
    """

    def __init__(self, name: str, fusion: Fusion, add_total: AddTotal = None, lengths: Lengths = "fixed") -> None:
        kind = _ACTIVATIONS[name]
        backward = kind.backward if fusion.is_compiled else kind.eager_backward
        self.forward = kind.forward if kind.is_one_operator else fusion(kind.forward, lengths=lengths)
        self.backward: Callable[..., Any] = fusion(backward, lengths=lengths)
        if add_total is not None:
            self.backward = adding(partial(fusion(_backward_and_total, lengths=lengths), backward), add_total)
        # Autograd's backward for a single operator is itself a single operator.
        self.has_backward = add_total is not None or not kind.is_one_operator

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _Activated.apply(x, self) if self.has_backward else self.forward(x)


class _Activated(torch.autograd.Function):
    """Autograd function that saves only the activation's input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kernel: ActivationKernel) -> torch.Tensor:
        ctx.kernel = kernel
        ctx.save_for_backward(x)
        return kernel.forward(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.kernel.backward(x, grad), None


def _backward_and_total(
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x's gradient, computed by `backward`, and its sum over tokens."""
    grad_x = backward(x, grad)
    return grad_x, total_of(grad_x)


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _swiglu_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Compute SwiGLU's gradient for x = [gate | up].

    dx = [dy up silu'(gate) | dy silu(gate)], where dy is `grad`
    silu'(g) = sigmoid(g) (1 + g (1 - sigmoid(g)))
    """
    gate, up = (accumulate(each) for each in x.chunk(2, dim=-1))
    sigmoid = gate.sigmoid()
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((grad * up * slope, grad * gate * sigmoid), dim=-1).to(x.dtype)


def _geglu_tanh(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def _geglu_tanh_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Compute GEGLU's gradient for x = [gate | up], where g is GELU's tanh approximation.

    dx    = [dy up g'(gate) | dy g(gate)], where dy is `grad`
    g(z)  = z (1 + t) / 2, t = tanh(u), u = sqrt(2 / pi) (z + 0.044715 z^3)
    g'(z) = (1 + t) / 2 + z (1 - t^2) / 2 sqrt(2 / pi) (1 + 0.134145 z^2)
    """
    gate, up = (accumulate(each) for each in x.chunk(2, dim=-1))
    share, slope = _tanh_share_and_slope(gate)
    return torch.cat((grad * up * slope, grad * gate * share), dim=-1).to(x.dtype)


def _tanh_share_and_slope(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute g(z) / z and g'(z), where g is GELU's tanh approximation."""
    scale, square = math.sqrt(2 / math.pi), z * z
    t = torch.tanh(scale * z * (1 + 0.044715 * square))
    share = 0.5 * (1 + t)
    return share, share + 0.5 * z * (1 - t * t) * scale * (1 + 0.134145 * square)


def _geglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate).mul_(up)


def _geglu_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Compute GEGLU's gradient [dy up g'(gate) | dy g(gate)], where g is GELU (1606.08415).

    g(z) = z P(z) and g'(z) = P(z) + z P'(z), where P is the standard normal distribution function.
    """
    gate, up = (accumulate(each) for each in x.chunk(2, dim=-1))
    share, slope = _share_and_slope(gate)
    return torch.cat((grad * up * slope, grad * gate * share), dim=-1).to(x.dtype)


def _share_and_slope(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute g(z) / z and g'(z) for GELU g(z) = z P(z), P the normal CDF."""
    below = 0.5 * (1 + torch.erf(z * math.sqrt(0.5)))
    return below, below + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def _gated_backward(
    gated: Callable[[torch.Tensor], torch.Tensor],
    gated_backward: Callable[..., torch.Tensor],
    x: torch.Tensor,
    grad: torch.Tensor,
) -> torch.Tensor:
    """Compute the gradient [dy up g'(gate) | dy g(gate)], writing each half of the result in place.

    `gated` is g, `gated_backward` torch's operator for its gradient.
    """
    gate, up = x.chunk(2, dim=-1)
    grad_x = torch.empty_like(x)
    grad_gate, grad_up = grad_x.chunk(2, dim=-1)
    torch.mul(grad, gated(gate), out=grad_up)
    gated_backward(grad * up, gate, grad_input=grad_gate)
    return grad_x


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return x.relu().square_()


def _squared_relu_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Compute dx = 2 dy max(x, 0)."""
    return x.relu().mul_(grad).mul_(2)


def _gelu_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return (grad * _share_and_slope(accumulate(x))[1]).to(x.dtype)


def _gelu_backward_of_torch(x: torch.Tensor, grad: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return torch.ops.aten.gelu_backward.grad_input(grad, x, approximate=approximate, grad_input=torch.empty_like(x))


def _gelu_tanh_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return (grad * _tanh_share_and_slope(accumulate(x))[1]).to(x.dtype)


_GELU_BACKWARD, _SILU_BACKWARD = torch.ops.aten.gelu_backward.grad_input, torch.ops.aten.silu_backward.grad_input
_GELU_TANH = partial(F.gelu, approximate="tanh")

_ACTIVATIONS: Mapping[str, _Activation] = MappingProxyType(
    {
        "gelu": _Activation(F.gelu, _gelu_backward, _gelu_backward_of_torch, is_one_operator=True),
        "gelu_tanh": _Activation(
            _GELU_TANH,
            _gelu_tanh_backward,
            partial(_gelu_backward_of_torch, approximate="tanh"),
            is_one_operator=True,
        ),
        "relu2": _Activation(_squared_relu, _squared_relu_backward, _squared_relu_backward),
        "swiglu": _Activation(_swiglu, _swiglu_backward, partial(_gated_backward, F.silu, _SILU_BACKWARD)),
        "geglu": _Activation(_geglu, _geglu_backward, partial(_gated_backward, F.gelu, _GELU_BACKWARD)),
        "geglu_tanh": _Activation(
            _geglu_tanh,
            _geglu_tanh_backward,
            partial(_gated_backward, _GELU_TANH, partial(_GELU_BACKWARD, approximate="tanh")),
        ),
    }
)
