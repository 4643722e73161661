"""Norms, activations and rotary embedding: pure functions, computed in the accumulation dtype, returned in the input's."""

import torch
import torch.nn.functional as F

from engine.precision import accumulate, accumulation_dtype


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm over the last dim (1607.06450). x [.., h]; weight, bias [h]."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dim (1910.07467). x [.., h]; weight [h]. torch squares and averages in the accumulation dtype."""
    return F.rms_norm(x, weight.shape, weight, eps)


def activation(name: str, x: torch.Tensor) -> torch.Tensor:
    """The MLP's nonlinearity. swiglu (2002.05202): x [.., 2f] = [gate | up] -> silu(gate) * up [.., f]; else [.., f]."""
    if name == "swiglu":
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


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
