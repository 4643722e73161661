"""Forms for the CPU of operators that only CUDA has, or whose results the CPU gives in other shapes."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

FORMS: dict[str, Callable[..., Any]] = {}
"""Operator, with its overload -> its form."""

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def form_of(*names: str) -> Decorator:
    """Register a form of operators."""

    def put(form: Callable[..., Any]) -> Callable[..., Any]:
        FORMS.update(dict.fromkeys(names, form))
        return form

    return put


def _always(args: Sequence[Any]) -> bool:
    return True


def _has_mask(args: Sequence[Any]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


SIZED_BY_VALUES: Mapping[str, Callable[[Sequence[Any]], bool]] = {
    **dict.fromkeys(
        (
            "aten.nonzero.default",
            "aten.masked_select.default",
            "aten._unique2.default",
            "aten.unique_dim.default",
            "aten.unique_consecutive.default",
            "aten.bincount.default",
            "aten.repeat_interleave.Tensor",
        ),
        _always,
    ),
    "aten.index.Tensor": _has_mask,
}
"""Operators whose result is as large as values say, for those arguments with which it is."""


# ---- norms
@form_of("aten._fused_rms_norm_backward.default")
def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Any, rstd: Tensor, weight: Tensor | None, mask: Sequence[bool]
) -> Any:
    """Backward of RMSNorm: dx = r (g w - n mean(g w n)), with n = x r."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    grad, normed = grad.to(dtype), x.to(dtype) * rstd
    weighted = grad if weight is None else grad * weight.to(dtype)
    dx = rstd * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    dw = (grad * normed).flatten(0, -2).sum(0) if mask[1] else None
    return dx.to(x.dtype) if mask[0] else None, None if dw is None or weight is None else dw.to(weight.dtype)


@form_of("aten.native_layer_norm.default")
def layer_norm(x: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    """LayerNorm over the last dim, with mean and reciprocal deviation in the dtype of the accumulation."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean, rstd = wide.mean(-1, keepdim=True), (wide.var(-1, unbiased=False, keepdim=True) + eps).rsqrt()
    out = (wide - mean) * rstd
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.dtype), mean, rstd


@form_of("aten.native_layer_norm_backward.default")
def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Any,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Any,
) -> Any:
    """Backward of LayerNorm: dx = r (g w - mean(g w) - n mean(g w n)), with n = (x - m) r."""
    grad, normed = grad.to(mean.dtype), (x.to(mean.dtype) - mean) * rstd
    weighted = grad if weight is None else grad * weight
    dx = rstd * (weighted - weighted.mean(-1, keepdim=True) - normed * (weighted * normed).mean(-1, keepdim=True))
    dw, db = (grad * normed).flatten(0, -2).sum(0), grad.flatten(0, -2).sum(0)
    return dx.to(x.dtype), dw if mask[1] else None, db if mask[2] else None


# ---- products whose result has another dtype than the factors
@form_of("aten.mm.dtype", "aten.bmm.dtype")
def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.to(dtype) @ b.to(dtype)


@form_of("aten.mm.dtype_out", "aten.bmm.dtype_out")
def product_into(a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(product(a, b, dtype))


@form_of("aten.addmm.dtype", "aten.baddbmm.dtype")
def sum_with_product(
    c: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    found = alpha * product(a, b, dtype)
    # With beta 0, c is not read: it may hold anything.
    return found if beta == 0 else beta * c.to(dtype) + found


@form_of("aten.addmm.dtype_out", "aten.baddbmm.dtype_out")
def sum_with_product_into(
    c: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:
    return out.copy_(sum_with_product(c, a, b, dtype, beta=beta, alpha=alpha))


# ---- products in FP8
TENSOR, ROWS, BLOCKS_OF_32, BLOCKS_OF_128, SQUARES_OF_128 = 0, 1, 3, 4, 5
"""Recipes of scales by torch's numbers: one of a tensor, of a row, of 1 x 32, 1 x 128 and 128 x 128 elements."""


def _from_tiles(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Order scales of 1 x 32 blocks that lie in tiles of 128 rows x 4: number 16 (r mod 32) + 4 (r div 32) + c in a tile."""
    down, across = -(-rows // 128), -(-columns // 4)
    tiles = scales.flatten()[: down * across * 512].float().view(down, across, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(down * 128, across * 4)[:rows, :columns]


def _scaled(x: Tensor, scales: Tensor, recipe: int, swizzle: int) -> Tensor:
    """Multiply rows [rows, contraction] in FP8 with their scales, in fp32."""
    rows, contraction = x.shape
    if recipe == TENSOR:
        return x.float() * scales.float().reshape(())
    if recipe == ROWS:
        return x.float() * scales.float().reshape(rows, 1)
    if recipe == BLOCKS_OF_32:
        places = contraction // 32
        each = _from_tiles(scales, rows, places) if swizzle else scales.float().reshape(rows, places)
        return x.float() * each.repeat_interleave(32, 1)
    if recipe == BLOCKS_OF_128:
        each = scales.float()[:rows, : -(-contraction // 128)]
        return x.float() * each.repeat_interleave(128, 1)[:, :contraction]
    if recipe == SQUARES_OF_128:
        # They come as [contraction / 128, padded to 4; rows / 128].
        each = scales.float().t()[: -(-rows // 128), : -(-contraction // 128)]
        return x.float() * each.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :contraction]
    raise ValueError(f"scales of recipe {recipe}")


@form_of("aten._scaled_mm_v2.default")
def scaled_product(
    a: Tensor,
    b: Tensor,
    scale_a: Sequence[Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    of_b = scale_b[0]
    if recipe_b[0] == BLOCKS_OF_128 and of_b.ndim == 2 and of_b.shape[0] != b.shape[1]:
        of_b = of_b.t()
    left = _scaled(a, scale_a[0], recipe_a[0], swizzle_a[0] if swizzle_a else 0)
    right = _scaled(b.t(), of_b, recipe_b[0], swizzle_b[0] if swizzle_b else 0)
    found = left @ right.t()
    return (found if bias is None else found + bias.float()).to(out_dtype or torch.bfloat16)


def _spread(scale: Tensor, over: Tensor) -> Tensor:
    """Repeat a scale of one element, of rows, columns or blocks to the size of a tensor."""
    if scale.numel() == 1:
        return scale.float().reshape(())
    spread = scale.float()
    for dim, size in enumerate(over.shape):
        if spread.shape[dim] not in (1, size):
            spread = spread.repeat_interleave(-(-size // spread.shape[dim]), dim).narrow(dim, 0, size)
    return spread


@form_of("aten._scaled_mm.default")
def scaled_product_of_spread(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    found = (a.float() * _spread(scale_a, a)) @ (b.float() * _spread(scale_b, b))
    return (found if bias is None else found + bias.float()).to(out_dtype or a.dtype)


@form_of("aten._scaled_mm.out")
def scaled_product_into(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *more: Any, out: Tensor, **named: Any
) -> Tensor:
    return out.copy_(scaled_product_of_spread(a, b, scale_a, scale_b, *more, **{"out_dtype": out.dtype, **named}))


# ---- products in groups
@form_of("aten._grouped_mm.default")
def grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Products of groups: of rows (a 2-d, b 3-d), of columns (a 3-d, b 2-d), or of the contraction (both 2-d)."""
    dtype = out_dtype or a.dtype
    if offs is None:
        return (a.float() @ b.float()).to(dtype)
    ends = offs.tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    a, b = a.float(), b.float()
    if a.ndim == 2 and b.ndim == 3:
        rows = torch.cat([a[start:stop] @ b[group] for group, (start, stop) in enumerate(spans)])
        return pad(rows, (0, 0, 0, a.shape[0] - rows.shape[0])).to(dtype)
    if a.ndim == 2:
        return torch.stack([a[:, start:stop] @ b[start:stop] for start, stop in spans]).to(dtype)
    return torch.cat([a[group] @ b[:, start:stop] for group, (start, stop) in enumerate(spans)], 1).to(dtype)


# ---- attention. q, k, v [b, heads, s, d]; the logarithms of the softmax's sums, lse [b, heads, s], in fp32
Window = tuple[int | None, int | None]


def _hidden(queries: int, keys: int, causal: bool, window: Window) -> Tensor:
    """Mark the keys that a query does not see; the last query is at the last key."""
    at = torch.arange(queries)[:, None] + (keys - queries)
    key = torch.arange(keys)[None]
    left, right = window
    hidden = key > at if causal else torch.zeros(queries, keys, dtype=torch.bool)
    if left is not None and left >= 0:
        hidden = hidden | (key < at - left)
    if right is not None and right >= 0:
        hidden = hidden | (key > at + right)
    return hidden


def _scores(
    q: Tensor, k: Tensor, causal: bool, scale: float | None, bias: Tensor | None, window: Window
) -> tuple[Tensor, float]:
    """Return the scores [b, heads, s, s], -inf where a query sees no key, and the scale in them."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ k.mT * scale
    if bias is not None:
        scores = scores + bias.float()
    return scores.masked_fill(_hidden(*scores.shape[-2:], causal, window), -math.inf), scale


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(scores - lse[..., None]).nan_to_num(0)


def _per_head(q: Tensor, *others: Tensor) -> list[Tensor]:
    """Repeat keys and values for the query heads that share them, in fp32."""
    return [each.float().repeat_interleave(q.shape[1] // each.shape[1], 1) for each in others]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    bias: Tensor | None = None,
    window: Window = (None, None),
) -> tuple[Tensor, Tensor]:
    """Return attention's output and lse, in fp32."""
    keys, of_values = _per_head(q, k, v)
    scores, _ = _scores(q.float(), keys, causal, scale, bias, window)
    lse = scores.logsumexp(-1)
    return _weights(scores, lse) @ of_values, lse


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    bias: Tensor | None = None,
    window: Window = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, in their dtypes, from the given output and lse; a sink changes both."""
    repeats = q.shape[1] // k.shape[1]
    keys, of_values = _per_head(q, k, v)
    queries, grad = q.float(), grad.float()
    scores, scale = _scores(queries, keys, causal, scale, bias, window)
    weights = _weights(scores, lse)
    of_scores = weights * (grad @ of_values.mT - (grad * out.float()).sum(-1, keepdim=True)) * scale

    def shared(each: Tensor) -> Tensor:
        return each.unflatten(1, (-1, repeats)).sum(2)

    of_k, of_v = shared(of_scores.mT @ queries), shared(weights.mT @ grad)
    return (of_scores @ keys).to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


NO_STATE = (None,) * 7
"""Lengths, seeds and masks that come with the output of a kernel; the CPU has none to write."""


@form_of("aten._scaled_dot_product_flash_attention.default")
def flash(
    q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, causal: bool = False, mask: bool = False, *, scale: Any = None
) -> Any:
    out, lse = attend(q, k, v, causal, scale)
    return out.to(q.dtype), lse, *NO_STATE


@form_of("aten._scaled_dot_product_flash_attention_backward.default")
def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *given: Any, scale: Any = None
) -> Any:
    return attend_backward(grad, q, k, v, out, lse, given[5], scale)


@form_of("aten._scaled_dot_product_cudnn_attention.default")
def cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    keep: bool,
    p: float = 0.0,
    causal: bool = False,
    mask: bool = False,
    *,
    scale: Any = None,
) -> Any:
    out, lse = attend(q, k, v, causal, scale, bias)
    return out.to(q.dtype), lse.unsqueeze(-1), *NO_STATE


@form_of("aten._scaled_dot_product_cudnn_attention_backward.default")
def cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Any,
    offset: Any,
    bias: Any,
    *given: Any,
    scale: Any = None,
) -> Any:
    return attend_backward(grad, q, k, v, out, lse[..., 0], given[5], scale, bias)


@form_of("aten._scaled_dot_product_efficient_attention.default")
def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, keep: bool, p: float = 0.0, causal: bool = False, *, scale: Any = None
) -> Any:
    out, lse = attend(q, k, v, causal, scale, bias)
    padded = pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
    return out.to(q.dtype), padded if keep else None, None, None


@form_of("aten._scaled_dot_product_efficient_attention_backward.default")
def efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    out: Tensor,
    lse: Tensor,
    seed: Any,
    offset: Any,
    p: float,
    mask: Any,
    causal: bool = False,
    *,
    scale: Any = None,
) -> Any:
    return *attend_backward(grad, q, k, v, out, lse[..., : q.shape[2]], causal, scale, bias), None


# Flash attention as torch's private operators have it: q, k, v [b, s, heads, d], or documents in a row [tokens, heads, d]
def _documents(of_queries: Tensor, of_keys: Tensor) -> list[tuple[slice, slice]]:
    pairs = zip(pairwise(of_queries.tolist()), pairwise(of_keys.tolist()), strict=True)
    return [(slice(*queries), slice(*keys)) for queries, keys in pairs if queries[1] > queries[0]]


def _alone(tensor: Tensor, part: slice) -> Tensor:
    """Return a document's tokens as [1, heads, s, d]."""
    return tensor[part].transpose(0, 1)[None]


@form_of("aten._flash_attention_forward.default")
def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of_queries: Tensor | None,
    of_keys: Tensor | None,
    *given: Any,
    scale: Any = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **more: Any,
) -> Any:
    causal, window = given[3], (window_size_left, window_size_right)
    if of_queries is None or of_keys is None:
        out, lse = attend(*(each.transpose(1, 2) for each in (q, k, v)), causal, scale, None, window)
        return out.transpose(1, 2).to(q.dtype), lse, None, None, None
    out, lse = torch.zeros(q.shape), torch.zeros(q.shape[1], q.shape[0])
    for queries, keys in _documents(of_queries, of_keys):
        one, its_lse = attend(_alone(q, queries), _alone(k, keys), _alone(v, keys), causal, scale, None, window)
        out[queries], lse[:, queries] = one[0].transpose(0, 1), its_lse[0]
    return out.to(q.dtype), lse, None, None, None


@form_of("aten._flash_attention_backward.default")
def flash_backward_of_documents(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    of_queries: Tensor | None,
    of_keys: Tensor | None,
    *given: Any,
    scale: Any = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:
    causal, window = given[3], (window_size_left, window_size_right)
    if of_queries is None or of_keys is None:
        heads_first = [each.transpose(1, 2) for each in (grad, q, k, v, out)]
        grads = attend_backward(*heads_first, lse, causal, scale, None, window)
        return tuple(each.transpose(1, 2) for each in grads)
    grads = [torch.zeros_like(each) for each in (q, k, v)]
    for queries, keys in _documents(of_queries, of_keys):
        parts = [_alone(grad, queries), _alone(q, queries), _alone(k, keys), _alone(v, keys), _alone(out, queries)]
        found = attend_backward(*parts, lse[:, queries][None], causal, scale, None, window)
        for to, part, one in zip(grads, (queries, keys, keys), found, strict=True):
            to[part] += one[0].transpose(0, 1)
    return tuple(grads)
