"""Norms, activations and rotary embedding: pure functions, computed in the accumulation dtype, returned in the input's.

RMSNorm and SwiGLU have their backward written out: what autograd would record of them keeps copies in the accumulation
dtype and products that are cheap to make again. Both keep their input, which somebody else holds anyway or made for them.
"""

from typing import Any

import torch
import torch.nn.functional as F

from engine.precision import accumulate, accumulation_dtype


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm over the last dim (1607.06450). x [.., h]; weight, bias [h]."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dim (1910.07467). x [.., h]; weight [h]. torch has a kernel of it on CUDA alone."""
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """y = n w with n = x r, r = 1 / sqrt(mean(x^2) + eps). Keeps x and r."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = accumulate(x)
        r = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (wide * r).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """dw = sum of dy n over the tokens; dx = r (dy w - n mean(dy w n))."""
        x, weight, r = ctx.saved_tensors
        n = accumulate(x) * r
        products = (n * grad).flatten(0, -2)
        grad_weight = products.sum(0)
        mean = products.mv(accumulate(weight)).div_(x.shape[-1]).view(r.shape)
        grad_x = n.mul_(mean.neg_()).add_(accumulate(grad) * weight).mul_(r)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def activation(name: str, x: torch.Tensor) -> torch.Tensor:
    """The MLP's nonlinearity. swiglu (2002.05202): x [.., 2f] = [gate | up] -> silu(gate) * up [.., f]; else [.., f]."""
    if name == "swiglu":
        return _SwiGLU.apply(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up. Keeps its input alone; silu(gate) is computed again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_x


def rope_tables(position_ids: torch.Tensor, head_dim: int, base: float, dtype: torch.dtype) -> torch.Tensor:
    """Cosines and sines of RoPE (2104.09864, section 3.4.2) at the given positions.

    Args:
        position_ids: int64 [b, s].
        head_dim: d, even.
        base: theta.
        dtype: the run's dtype; tables are in its accumulation dtype.

    Returns:
        [2, s, b, 1, d]: cosines, then sines, the angles of dims i and i + d/2 being equal ("rotate half"). The sines of the
        first half have their sign turned: it belongs to what they multiply, the second half.
    """
    wide = accumulation_dtype(dtype)
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=wide) / head_dim
    angles = position_ids.t().to(wide).unsqueeze(-1) * base**-exponents
    angles = torch.cat((-angles, angles), dim=-1).unsqueeze(2)
    return torch.stack((angles.cos(), angles.sin()))


def apply_rope(x: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Rotate x [s, b, heads, d] by the tables of `rope_tables`."""
    wide = accumulate(x)
    first, second = wide.chunk(2, dim=-1)
    return (wide * tables[0] + torch.cat((second, first), dim=-1) * tables[1]).to(x.dtype)
