"""Tries attention kernels on a short sequence, forward and backward, before anything is built."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch._subclasses import FakeTensor

from triaxis.engine.config.quantities.attention_pattern import PLAIN, AttentionPattern
from triaxis.engine.config.values.attention_kernels import ATTENTION_KERNELS
from triaxis.engine.data.documents import Documents
from triaxis.engine.data.sequence_part import SequencePart
from triaxis.engine.kernels.attention import attention
from triaxis.engine.kernels.fusion import EAGER, Fusion
from triaxis.engine.kernels.masked_attention import Mask
from triaxis.engine.kernels.te import how_to_install, open_te
from triaxis.engine.kernels.te_attention import TeAttention
from triaxis.engine.kernels.trial import failure

_TRIED_LENGTH = 128


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The facts that decide whether an attention kernel runs on this rank.

    Attributes:
        num_heads, num_kv_heads: numbers of query heads and of key/value heads on this rank.
        pattern: features that the model's attention needs.
        value_dim: value size per head; None means `head_dim`, the query and key size.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    pattern: AttentionPattern = PLAIN
    value_dim: int | None = None


def attention_failure(kernel: str, shape: AttentionShape) -> str:
    """Run a named kernel, forward and backward, on a short sequence.

    `te` is also compared with `blocks`; with context parallelism, any other kernel is compared with `blocks`. `explicit`,
    and `sdpa` for plain attention, are not tried.

    Returns:
        The reason if the run fails or differs, else "".
    """
    if kernel == "te" and (lacks := ATTENTION_KERNELS[kernel].lacks(shape.pattern.asked)):
        return f"it has {lacks}"

    def train() -> None:
        # An engine that only runs forwards may be built with gradients off.
        with torch.enable_grad():
            _trial(kernel, shape).sum().backward()

    compared = partial(_try_part if shape.pattern.parts else _try_te, kernel, shape)
    return _failure(kernel, shape, compared if kernel == "te" or shape.pattern.parts else train)


def decoding_failure(kernel: str, shape: AttentionShape) -> str:
    """Run a named kernel, forward only, on one query and 128 keys of one document.

    `explicit`, and `sdpa` for plain attention, are not tried.

    Returns:
        torch's reason if the run fails, else "".
    """

    def decode() -> None:
        q, k, v = _operands(shape, num_queries=1)
        mask, options = _asked(shape)
        attention(kernel, q, k, v, replace(mask, documents=None), is_causal=False, **options)

    return _failure(kernel, shape, decode)


def _failure(kernel: str, shape: AttentionShape, run: Callable[[], None]) -> str:
    # torch's own choice always runs, and so do plain operators.
    if kernel == "explicit" or (kernel == "sdpa" and shape.pattern.is_plain):
        return ""
    # Keep only the first sentence. The following ones list torch's reasons against every backend.
    return failure(run).partition(". ")[0]


def attention_refusal(kernel: str, shape: AttentionShape, reason: str) -> str:
    """Write the config error for a named kernel that does not run here."""
    dtype = str(shape.dtype).removeprefix("torch.")
    other = "sdpa" if shape.pattern.is_plain else "auto"
    return (
        f"kernels.attention = {kernel} does not run here, with {shape.num_heads} query and {shape.num_kv_heads} key/value "
        f"heads of size {shape.head_dim} in {dtype} on {shape.device.type} (torch says: {reason}). Another kernel would "
        f"have other speed and other bits than what was asked for. Let torch choose with kernels.attention={other}, or "
        + (f"install it: {how_to_install()}" if kernel == "te" else "install a torch that has it.")
    )


def chosen(shape: AttentionShape) -> str:
    """Return the name of the kernel that torch chooses for `sdpa`, such as FlashAttentionForCpu or math."""
    with torch.enable_grad():
        node = _trial("sdpa", replace(shape, pattern=PLAIN)).grad_fn
    name = "" if node is None else node.name()
    fused = name.removeprefix("ScaledDotProduct").partition("Backward")[0]
    return fused if name.startswith("ScaledDotProduct") else "math"


def _trial(kernel: str, shape: AttentionShape) -> torch.Tensor:
    q, k, v = (operand.requires_grad_() for operand in _operands(shape, num_queries=_TRIED_LENGTH))
    mask, options = _asked(shape)
    fusion = Fusion("compiled") if ATTENTION_KERNELS[kernel].is_compiled else EAGER
    return attention(kernel, q, k, v, mask, is_causal=True, fusion=fusion, **options)


def _try_part(kernel: str, shape: AttentionShape) -> None:
    """Compare attention from parts of a row, forward and backward, with plain operators.

    Raises:
        RuntimeError: the kernel does not support parts, or silently aligns the causal mask with the first key.
    """
    quarter = _TRIED_LENGTH // 4
    _, options = _asked(replace(shape, pattern=replace(shape.pattern, parts=False)))
    rows = [[_TRIED_LENGTH // 2] * 2 if shape.pattern.documents else [_TRIED_LENGTH]]
    mine, other = ((quarter, 2 * quarter), (3 * quarter, 4 * quarter)), ((0, quarter), (2 * quarter, 3 * quarter))
    part = SequencePart.of([[mine, other]], 0, rows).map(lambda tensor: tensor.to(shape.device))
    documents = Documents.of(rows).map(lambda tensor: tensor.to(shape.device)) if shape.pattern.documents else None
    mask = Mask(quarter if shape.pattern.windows else None, documents, part)
    (out, *_), (plain, *_) = (_results(name, shape, 2 * quarter, mask, **options) for name in (kernel, "blocks"))
    # A footprint's tensors have no values to compare.
    if not isinstance(plain, FakeTensor) and (out - plain).norm() > 0.05 * plain.norm():
        raise RuntimeError("its causal mask does not end at the last query and the last key")


def _try_te(kernel: str, shape: AttentionShape) -> None:
    """Compare Transformer Engine's attention, forward and backward, with plain operators.

    Raises:
        RuntimeError: its output or a gradient differs.
    """
    mask, te = Mask(_TRIED_LENGTH // 4 if shape.pattern.windows else None), TeAttention(open_te())
    found, plain = (_results(name, shape, _TRIED_LENGTH, mask, te=te) for name in (kernel, "blocks"))
    if not all((one - other).norm() < 0.05 * other.norm() for one, other in zip(found, plain, strict=True)):
        raise RuntimeError("its result or gradients are not those of attention")


def _results(
    kernel: str, shape: AttentionShape, num_queries: int, mask: Mask, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Compute attention from random numbers, and return the output and the gradients for q, k and v, in float64."""
    generator, device = torch.Generator().manual_seed(1), shape.device
    q, k, v = (
        torch.randn(1, heads, length, shape.head_dim, generator=generator).to(device, shape.dtype).requires_grad_()
        for heads, length in (
            (shape.num_heads, num_queries),
            (shape.num_kv_heads, _TRIED_LENGTH),
            (shape.num_kv_heads, _TRIED_LENGTH),
        )
    )
    with torch.enable_grad():
        out = attention(kernel, q, k, v, mask, is_causal=True, **options)
        out.square().sum().backward()
    return tuple(each.detach().double() for each in (out, q.grad, k.grad, v.grad) if each is not None)


def _asked(shape: AttentionShape) -> tuple[Mask, dict[str, Any]]:
    """Return a mask and arguments for `attention` that use every feature in the shape except row parts."""
    pattern, device = shape.pattern, shape.device
    halves = Documents.of([[_TRIED_LENGTH // 2] * 2]).map(lambda tensor: tensor.to(device))
    mask = Mask(_TRIED_LENGTH // 4 if pattern.windows else None, halves if pattern.documents else None)
    return mask, {
        "softcap": 1.0 if pattern.softcap else None,
        "sinks": torch.zeros(shape.num_heads, dtype=shape.dtype, device=device) if pattern.sinks else None,
    }


def _operands(shape: AttentionShape, num_queries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make zeros q [1, n, num_queries, d], k [1, n_kv, 128, d] and v [1, n_kv, 128, d_v]."""

    def zeros(heads: int, length: int, size: int) -> torch.Tensor:
        return torch.zeros(1, heads, length, size, dtype=shape.dtype, device=shape.device)

    kv_heads, d = shape.num_kv_heads, shape.head_dim
    values = zeros(kv_heads, _TRIED_LENGTH, d if shape.value_dim is None else shape.value_dim)
    return zeros(shape.num_heads, num_queries, d), zeros(kv_heads, _TRIED_LENGTH, d), values
