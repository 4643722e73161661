"""Fused attention by the kernel named in the configuration (torch's scaled_dot_product_attention).

    sdpa                       torch chooses a kernel for the shapes; `chosen` names it
    flash, cudnn, efficient    this one, or an error before anything is built
    math                       torch's own formula, operator by operator: for decoding where no fused kernel runs

None of them keeps the probabilities; `explicit` attention, which does, is in the model (`models/gpt/attention.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS: Mapping[str, SDPBackend] = MappingProxyType(
    {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
)

_TRIED_LENGTH = 128


def attention(kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    """Compute scaled dot-product attention: q [b, n, s, d], k, v [b, n_kv, s_k, d] -> [b, n, s, d]."""
    has_groups = k.shape[1] != q.shape[1]
    if kernel not in BACKENDS:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=has_groups)
    with sdpa_kernel(BACKENDS[kernel]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=has_groups)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The facts that decide whether a kernel runs: heads on one rank, their size, dtype and device."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def attention_failure(kernel: str, shape: AttentionShape) -> str:
    """Try a named kernel, forward and backward, on a short sequence; return torch's reason if it does not run, else ""."""
    return _failure(kernel, lambda: _trial(kernel, shape).sum().backward())


def decoding_failure(kernel: str, shape: AttentionShape) -> str:
    """Try a named kernel on one query and some keys, forward alone; return torch's reason if it does not run, else ""."""

    def decode() -> None:
        q, k, v = _operands(shape, num_queries=1)
        attention(kernel, q, k, v, is_causal=False)

    return _failure(kernel, decode)


def _failure(kernel: str, run: Callable[[], None]) -> str:
    if kernel not in BACKENDS:
        return ""
    try:
        run()
    except RuntimeError as error:
        return str(error).splitlines()[0].rstrip(".")
    return ""


def attention_refusal(kernel: str, shape: AttentionShape, reason: str) -> str:
    """Return the problem of a named kernel that does not run here."""
    dtype = str(shape.dtype).removeprefix("torch.")
    return (
        f"kernels.attention = {kernel} does not run here, with {shape.num_heads} query and {shape.num_kv_heads} key/value "
        f"heads of size {shape.head_dim} in {dtype} on {shape.device.type} (torch says: {reason}). Another kernel would "
        "have other speed and other bits than what was asked for. Let torch choose with kernels.attention=sdpa, or "
        "install a torch that has it."
    )


def chosen(shape: AttentionShape) -> str:
    """Return torch's name of its choice for `sdpa`: FlashAttentionForCpu, CudnnAttention, ..., or math."""
    node = _trial("sdpa", shape).grad_fn
    name = "" if node is None else node.name()
    fused = name.removeprefix("ScaledDotProduct").partition("Backward")[0]
    return fused if name.startswith("ScaledDotProduct") else "math"


def _trial(kernel: str, shape: AttentionShape) -> torch.Tensor:
    q, k, v = (operand.requires_grad_() for operand in _operands(shape, num_queries=_TRIED_LENGTH))
    with torch.enable_grad():
        return attention(kernel, q, k, v, is_causal=True)


def _operands(shape: AttentionShape, num_queries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q [1, n, num_queries, d] and k, v [1, n_kv, 128, d], of zeros."""

    def zeros(heads: int, length: int) -> torch.Tensor:
        return torch.zeros(1, heads, length, shape.head_dim, dtype=shape.dtype, device=shape.device)

    kv_heads = shape.num_kv_heads
    return zeros(shape.num_heads, num_queries), zeros(kv_heads, _TRIED_LENGTH), zeros(kv_heads, _TRIED_LENGTH)
