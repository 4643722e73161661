"""Computes attention with the kernel named in the configuration.

    sdpa                       the kernel that torch chooses for the shapes (`attention_trials.chosen` names it)
    flash, cudnn, efficient    torch's backend of this name, and no other
    varlen                     flash attention on a GPU, with windows, documents, sinks and parts of rows
    flex                       FlexAttention, compiled for a GPU, with windows, sinks and capped logits (`flex_attention.py`)
    te                         Transformer Engine's attention, with windows (`te_attention.py`)
    blocks                     plain operators on one block of queries at a time, on any device, with all features but dropout
    math                       torch's formula in plain operators, for decoding where no fused kernel runs
    explicit                   plain operators that save the probabilities, the only kernel with dropout (`explicit_attention.py`)

On the CPU, sdpa and flash also support windows, documents, sinks and parts of rows (context parallelism).
"""

from contextlib import nullcontext
from functools import cache
from pkgutil import resolve_name
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from triaxis.engine.config.values.attention_kernels import ALL, ATTENTION_KERNELS
from triaxis.engine.kernels.explicit_attention import Drop, explicit_attention
from triaxis.engine.kernels.fusion import EAGER, Fusion
from triaxis.engine.kernels.masked_attention import WHOLE, Kernel, Mask, masked_attention
from triaxis.engine.kernels.te_attention import TeAttention


def attention(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask = WHOLE,
    *,
    is_causal: bool,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    te: TeAttention | None = None,
    drop: Drop | None = None,
    fusion: Fusion = EAGER,
) -> torch.Tensor:
    """Compute scaled dot-product attention.

    The shapes are q [b, n, s, d], k [b, n_kv, s_k, d], v [b, n_kv, s_k, d_v] -> [b, n, s, d_v].

    Args:
        kernel: name in `triaxis.engine.config.values.attention_kernels.ATTENTION_KERNELS`.
        q, k, v: operands with one dtype; d_v <= d.
        mask: restriction on the visible keys beyond causality, on q's device.
        is_causal: whether queries see no later keys, which needs s_k = s or `mask.part`; False for a single query (s = 1) at the
            last of s_k positions.
        scale: logit factor; None means d ** -0.5.
        softcap: cap c in c tanh(logit / c), or None for uncapped logits.
        sinks: one logit per head [n] in the softmax's denominator, or None.
        te: Transformer Engine's attention, for the kernel `te`.
        drop: dropout on the probabilities, for the kernel `explicit`.
        fusion: runs elementwise functions, for the kernels `blocks` and `flex`.

    Raises:
        RuntimeError: the kernel does not support what the arguments ask for.
    """
    if kernel == "explicit" and drop is not None:
        return explicit_attention(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks, drop=drop)
    size, record = v.shape[-1], ATTENTION_KERNELS[kernel]
    if size != q.shape[-1] and not record.has_value_size:
        # torch's fast kernels need d_v = d. For other sizes, torch's choice on the CPU would save the probabilities.
        v = F.pad(v, (0, q.shape[-1] - size))
    window, documents = mask.window, mask.documents
    if window is not None and window >= k.shape[2]:
        window = None
    elif window is not None and not is_causal:  # one query at the last position sees exactly these keys
        k, v, window = k[:, :, -window:], v[:, :, -window:], None
    if documents is not None and documents.is_one_per_row:
        documents = None
    mask = Mask(window, documents, mask.part)
    if kernel == "te" and te is not None:
        if softcap is not None or sinks is not None or mask != Mask(window):
            raise RuntimeError(f"it has {record.lacks(ALL)}")
        out = te(q, k, v, window=window, scale=scale)
    elif record.backend is None or mask != WHOLE or sinks is not None or softcap is not None:
        out = masked_attention(masked_kernel(kernel, q.device, mask, scale, softcap, fusion), q, k, v, sinks)
    else:
        options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": k.shape[1] != q.shape[1], "scale": scale}
        with sdpa_kernel(getattr(SDPBackend, record.backend)) if record.backend else nullcontext():
            out = F.scaled_dot_product_attention(q, k, v, **options)
    return out if out.shape[-1] == size else out[..., :size]


def masked_kernel(
    name: str,
    device: torch.device,
    mask: Mask,
    scale: float | None,
    softcap: float | None,
    fusion: Fusion = EAGER,
) -> Kernel[Any]:
    """Build the named kernel for a mask.

    Raises:
        RuntimeError: the kernel supports none of windows, documents and sinks on this device, or `softcap` is given and the
            kernel cannot cap logits. varlen can be built on a CPU, but raises when it is called there.
    """
    record = ATTENTION_KERNELS[name]
    if softcap is not None and record.lacks(frozenset({"softcap"})):
        raise RuntimeError("it cannot cap the logits; blocks can")
    if not record.made_by or record.made_for not in ("", device.type):
        raise RuntimeError(f"it has no windows, documents or sinks on {device.type}; blocks has")
    made: Kernel[Any] = _imported(record.made_by)(mask, scale, softcap, fusion)
    return made


_imported = cache(resolve_name)
