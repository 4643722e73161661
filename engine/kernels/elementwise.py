"""Norms, activations and dropout: computed in the accumulation dtype, returned in the input's.

Each has its backward written out: autograd would record copies in the accumulation dtype and products that are cheap to recompute.
All save their inputs, which exist anyway, and little else.

`fusion` runs the two functions of each (`engine/kernels/fusion.py`). LayerNorm, RMSNorm on a GPU and GELU use torch's own kernels
where nothing is compiled; GELU's forward always, being one operator.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from triaxis.engine.kernels.bias_total import AddTotal, total_of
from triaxis.engine.kernels.fusion import Fusion, Lengths
from triaxis.engine.numerics.hashing import GOLDEN, mix_words_, shift_right
from triaxis.engine.numerics.precision import accumulate, accumulation_dtype


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, fusion: Fusion) -> torch.Tensor:
    """Apply LayerNorm over the last dim (1607.06450). x [.., h]; weight, bias [h]."""
    if fusion.is_compiled:
        return _LayerNorm.apply(x, weight, bias, eps, fusion)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class _LayerNorm(torch.autograd.Function):
    """y = n w + b with n = (x - mean) r, r = 1 / sqrt(variance + eps). Saves x, mean and r."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, fusion: Fusion
    ) -> torch.Tensor:
        y, mean, r = fusion(layer_norm_forward)(x, weight, bias, eps)
        ctx.fusion = fusion
        ctx.save_for_backward(x, weight, mean, r)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        _, weight, *_ = saved = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = ctx.fusion(layer_norm_backward)(*saved, grad, weight.dtype)
        return grad_x, grad_weight, grad_bias, None, None


def layer_norm_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, and the mean and r of each token."""
    wide = accumulate(x)
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    r = centred.square().mean(-1, keepdim=True).add(eps).rsqrt()
    return (centred * r * weight + bias).to(x.dtype), mean, r


def layer_norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    r: torch.Tensor,
    grad: torch.Tensor,
    of_weights: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dx = r (dy w - mean(dy w) - n mean(dy w n)); in `of_weights` dw = sum of dy n over the tokens, db = sum of dy."""
    n = (accumulate(x) - mean) * r
    wide = accumulate(grad)
    grad_weight, grad_bias = (each.flatten(0, -2).sum(0) for each in (wide * n, wide))
    scaled = wide * weight
    grad_x = (scaled - scaled.mean(-1, keepdim=True) - n * (scaled * n).mean(-1, keepdim=True)) * r
    return grad_x.to(x.dtype), grad_weight.to(of_weights), grad_bias.to(of_weights)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, fusion: Fusion) -> torch.Tensor:
    """Apply RMSNorm over the last dim (1910.07467). x [.., h]; weight [h]. torch has a kernel of it only on CUDA."""
    if x.is_cuda and not fusion.is_compiled:
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps, 0, fusion)


def rms_norm_1p(x: torch.Tensor, weight: torch.Tensor, eps: float, fusion: Fusion) -> torch.Tensor:
    """Apply RMSNorm with the gains 1 + weight. x [.., h]; weight [h], less 1, so that a small change keeps its bits.

    Sum and product are in the accumulation dtype, rounded once, as in Gemma (transformers' `Gemma2RMSNorm`).
    """
    return _RMSNorm.apply(x, weight, eps, 1, fusion)


class _RMSNorm(torch.autograd.Function):
    """y = n g with n = x r, r = 1 / sqrt(mean(x^2) + eps), gains g = offset + w. Saves x and r."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: int, fusion: Fusion
    ) -> torch.Tensor:
        y, r = fusion(rms_norm_forward)(x, weight, eps, offset)
        ctx.offset, ctx.fusion = offset, fusion
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        x, weight, r = ctx.saved_tensors
        backward = rms_norm_backward if ctx.fusion.is_compiled else rms_norm_backward_in_place
        grad_x, grad_weight = ctx.fusion(backward)(x, weight, r, grad, ctx.offset, weight.dtype)
        return grad_x, grad_weight, None, None, None


def _gains(weight: torch.Tensor, offset: int) -> torch.Tensor:
    return accumulate(weight) + offset if offset else weight


def rms_norm_forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y, and the r of each token."""
    wide = accumulate(x)
    r = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * r).mul_(_gains(weight, offset)).to(x.dtype), r


def rms_norm_backward(
    x: torch.Tensor, weight: torch.Tensor, r: torch.Tensor, grad: torch.Tensor, offset: int, of_weight: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx = r (dy g - n mean(dy g n)); in `of_weight` dw = sum of dy n over the tokens.

    The mean is over rows as the norm's own is, so that the compiler passes over x and dy once for all.
    """
    n = accumulate(x) * r
    wide = accumulate(grad)
    scaled = wide * _gains(weight, offset)
    grad_x = (scaled - n * (scaled * n).mean(-1, keepdim=True)) * r
    return grad_x.to(x.dtype), (wide * n).flatten(0, -2).sum(0).to(of_weight)


def rms_norm_backward_in_place(
    x: torch.Tensor, weight: torch.Tensor, r: torch.Tensor, grad: torch.Tensor, offset: int, of_weight: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same in few passes operator by operator: one product serves both sums."""
    gains = _gains(weight, offset)
    n = accumulate(x) * r
    products = (n * grad).flatten(0, -2)
    grad_weight = products.sum(0)
    minus_mean = products.mv(accumulate(gains)).div_(-x.shape[-1]).view(r.shape)
    del products
    grad_x = n.mul_(minus_mean).add_(accumulate(grad) * gains).mul_(r)
    return grad_x.to(x.dtype), grad_weight.to(of_weight)


_NORMS: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {"layernorm": layer_norm, "rmsnorm": rms_norm, "rmsnorm_1p": rms_norm_1p}
)


def norm(name: str, x: torch.Tensor, weights: Sequence[torch.Tensor], eps: float, fusion: Fusion) -> torch.Tensor:
    """Normalise x [.., h] over its last dim; weights [h] in the order of `layer_kinds.Norm.parameters`.

    Raises:
        KeyError: no kernel has this name.
    """
    return _NORMS[name](x, *weights, eps, fusion)


@dataclass(frozen=True, slots=True)
class _Activation:
    """The functions of an activation: x [.., f] -> [.., f], and (x, grad [.., f]) -> grad of x.

    Of a gated one, x is [gate | up] [.., 2f]. The compiler takes no part of a tensor as `out`. Eager code uses `eager_backward`,
    with torch's own kernels, which writes each half of the gradient in its place: `cat` would be two passes more.
    """

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    eager_backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    is_one_operator: bool = False


class _Activated(torch.autograd.Function):
    """An activation that saves only its input; what the backward needs besides is recomputed."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, kind: _Activation, fusion: Fusion, add_total: AddTotal, lengths: Lengths
    ) -> torch.Tensor:
        ctx.kind, ctx.fusion, ctx.add_total, ctx.lengths = kind, fusion, add_total, lengths
        ctx.save_for_backward(x)
        return kind.forward(x) if kind.is_one_operator else fusion(kind.forward, lengths=lengths)(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (x,) = ctx.saved_tensors
        backward = ctx.kind.backward if ctx.fusion.is_compiled else ctx.kind.eager_backward
        if ctx.add_total is None:
            return ctx.fusion(backward, lengths=ctx.lengths)(x, grad), None, None, None, None
        grad_x, total = ctx.fusion(_backward_and_total, lengths=ctx.lengths)(backward, x, grad)
        ctx.add_total(total)
        return grad_x, None, None, None, None


def _backward_and_total(
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of x, and its sum over the tokens."""
    grad_x = backward(x, grad)
    return grad_x, total_of(grad_x)


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _swiglu_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return [dy up silu'(gate) | dy silu(gate)] with silu'(g) = sigmoid(g) (1 + g (1 - sigmoid(g)))."""
    gate, up = (accumulate(each) for each in x.chunk(2, dim=-1))
    sigmoid = gate.sigmoid()
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((grad * up * slope, grad * gate * sigmoid), dim=-1).to(x.dtype)


def _swiglu_backward_in_parts(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Compute the same, and write each half in its place."""
    gate, up = x.chunk(2, dim=-1)
    grad_x = torch.empty_like(x)
    grad_gate, grad_up = grad_x.chunk(2, dim=-1)
    torch.mul(grad, F.silu(gate), out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
    return grad_x


def _geglu_tanh(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def _geglu_tanh_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return [dy up g'(gate) | dy g(gate)] with g(z) = z (1 + t) / 2, t = tanh(u), u = sqrt(2 / pi) (z + 0.044715 z^3).

    Then g'(z) = (1 + t) / 2 + z (1 - t^2) / 2 sqrt(2 / pi) (1 + 0.134145 z^2).
    """
    gate, up = (accumulate(each) for each in x.chunk(2, dim=-1))
    share, slope = _tanh_share_and_slope(gate)
    return torch.cat((grad * up * slope, grad * gate * share), dim=-1).to(x.dtype)


def _tanh_share_and_slope(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return g(z) / z = (1 + t) / 2 and g'(z) of GELU's approximation."""
    scale, square = math.sqrt(2 / math.pi), z * z
    t = torch.tanh(scale * z * (1 + 0.044715 * square))
    share = 0.5 * (1 + t)
    return share, share + 0.5 * z * (1 - t * t) * scale * (1 + 0.134145 * square)


def _geglu_tanh_backward_in_parts(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Compute the same, and write each half in its place."""
    gate, up = x.chunk(2, dim=-1)
    grad_x = torch.empty_like(x)
    grad_gate, grad_up = grad_x.chunk(2, dim=-1)
    torch.mul(grad, F.gelu(gate, approximate="tanh"), out=grad_up)
    torch.ops.aten.gelu_backward.grad_input(grad * up, gate, approximate="tanh", grad_input=grad_gate)
    return grad_x


def _geglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate).mul_(up)


def _geglu_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return [dy up g'(gate) | dy g(gate)] with g(z) = z P(z), P the normal distribution (1606.08415): g'(z) = P(z) + z P'(z)."""
    gate, up = (accumulate(each) for each in x.chunk(2, dim=-1))
    share, slope = _share_and_slope(gate)
    return torch.cat((grad * up * slope, grad * gate * share), dim=-1).to(x.dtype)


def _share_and_slope(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return g(z) / z = P(z) and g'(z) of GELU."""
    below = 0.5 * (1 + torch.erf(z * math.sqrt(0.5)))
    return below, below + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def _geglu_backward_in_parts(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Compute the same, and write each half in its place."""
    gate, up = x.chunk(2, dim=-1)
    grad_x = torch.empty_like(x)
    grad_gate, grad_up = grad_x.chunk(2, dim=-1)
    torch.mul(grad, F.gelu(gate), out=grad_up)
    torch.ops.aten.gelu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
    return grad_x


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return x.relu().square_()


def _squared_relu_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return dx = 2 dy max(x, 0)."""
    return x.relu().mul_(grad).mul_(2)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)


def _gelu_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return (grad * _share_and_slope(accumulate(x))[1]).to(x.dtype)


def _gelu_backward_of_torch(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward.grad_input(grad, x, grad_input=torch.empty_like(x))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_tanh_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return (grad * _tanh_share_and_slope(accumulate(x))[1]).to(x.dtype)


def _gelu_tanh_backward_of_torch(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=torch.empty_like(x))


_ACTIVATIONS: Mapping[str, _Activation] = MappingProxyType(
    {
        "gelu": _Activation(_gelu, _gelu_backward, _gelu_backward_of_torch, is_one_operator=True),
        "gelu_tanh": _Activation(_gelu_tanh, _gelu_tanh_backward, _gelu_tanh_backward_of_torch, is_one_operator=True),
        "relu2": _Activation(_squared_relu, _squared_relu_backward, _squared_relu_backward),
        "swiglu": _Activation(_swiglu, _swiglu_backward, _swiglu_backward_in_parts),
        "geglu": _Activation(_geglu, _geglu_backward, _geglu_backward_in_parts),
        "geglu_tanh": _Activation(_geglu_tanh, _geglu_tanh_backward, _geglu_tanh_backward_in_parts),
    }
)


def activation(
    name: str, x: torch.Tensor, fusion: Fusion, add_total: AddTotal = None, lengths: Lengths = "fixed"
) -> torch.Tensor:
    """Apply the nonlinearity of an MLP: x [.., f], of a gated one [.., 2f] = [gate | up] -> [.., f].

    Args:
        name: of the kernel.
        x: its input.
        fusion: runs the two functions.
        add_total: called in the backward with the gradient of x summed over its tokens, the gradient of a bias.
        lengths: that one compiled kernel takes.

    Raises:
        KeyError: no kernel has this name.
    """
    kind = _ACTIVATIONS[name]
    if kind.is_one_operator and add_total is None:
        # Autograd has its backward, which is one operator as well.
        return kind.forward(x)
    return _Activated.apply(x, kind, fusion, add_total, lengths)


def keyed_dropout(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    keys: torch.Tensor,
    positions: torch.Tensor,
    p: float,
    fusion: Fusion,
) -> torch.Tensor:
    """Zero elements of x with probability p, scale the rest by 1 / (1 - p), and add the residual if there is one.

    An element is kept by a hash of its key and position: keep = hash >= p 2^32.

    Args:
        x: any float tensor.
        residual: of x's shape, or None.
        keys: int64, broadcastable to x.
        positions: int64, broadcastable to x.
        p: 0 < p < 1.
    """
    return _KeyedDropout.apply(x, residual, keys, positions, p, fusion)


class _KeyedDropout(torch.autograd.Function):
    """y = x f (+ residual) with f = keep / (1 - p). Saves f in x's dtype: hashing again costs more than the memory."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        keys: torch.Tensor,
        positions: torch.Tensor,
        p: float,
        fusion: Fusion,
    ) -> torch.Tensor:
        if residual is None:
            y, factor = fusion(_dropped)(x, keys, positions, p)
        else:
            y, factor = fusion(_dropped_on)(residual, x, keys, positions, p)
        ctx.has_residual = residual is not None
        ctx.save_for_backward(factor)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None, None]:
        (factor,) = ctx.saved_tensors
        return grad * factor, grad if ctx.has_residual else None, None, None, None, None


def _dropped(
    x: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x f, and f."""
    keep = keyed_hash(keys, positions) >= int(p * 2**32)
    factor = keep.to(accumulation_dtype(x.dtype)).mul_(1.0 / (1.0 - p)).to(x.dtype)
    return x * factor, factor


def _dropped_on(
    residual: torch.Tensor, x: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return residual + x f, and f."""
    dropped, factor = _dropped(x, keys, positions, p)
    return residual + dropped, factor


def keyed_hash(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a number in [0, 2^32) per element: splitmix64 at counter key + position * golden, upper half."""
    return shift_right(mix_words_(keys + (positions + 1) * GOLDEN), 32)
