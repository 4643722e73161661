"""Forms for the CPU of operators that only CUDA has, or whose results the CPU gives in other shapes."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.nn.functional import pad

aten = torch.ops.aten

Form = Callable[..., Any]

FORMS: dict[str, Form] = {}
"""Operator, with its overload -> its form."""


def form_of(name: str) -> Callable[[Form], Form]:
    """Register a form of an operator. It gets all arguments by their names; its results may be wider than the operator's."""

    def put(form: Form) -> Form:
        defaults = {each.name: each.default_value for each in attrgetter(name)(torch.ops)._schema.arguments}
        FORMS[name] = lambda *args, **named: form(**defaults | dict(zip(defaults, args, strict=False)) | named)
        return form

    return put


SIZED_BY_VALUES = {
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten._unique2.default",
    "aten.unique_dim.default",
    "aten.unique_consecutive.default",
    "aten.bincount.default",
    "aten.repeat_interleave.Tensor",
}


def is_sized_by_values(name: str, args: Sequence[Any]) -> bool:
    """Whether the result of an operator is as large as values say."""
    if name == "aten.index.Tensor":
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return name in SIZED_BY_VALUES


# ---- norms
for _operator in (aten._fused_rms_norm_backward.default, aten.native_layer_norm_backward.default):
    FORMS[str(_operator)] = decomposition_table[_operator]


@form_of("aten.native_layer_norm.default")
def layer_norm(normalized_shape: Sequence[int], eps: float, **given: Any) -> Any:
    """LayerNorm, with mean and reciprocal deviation in the dtype of the accumulation."""
    dtype = torch.promote_types(given["input"].dtype, torch.float32)
    wide = {name: None if each is None else each.to(dtype) for name, each in given.items()}
    return torch.native_layer_norm(normalized_shape=normalized_shape, eps=eps, **wide)


# ---- products
@form_of("aten.addmm.dtype_out")
def sum_with_product(self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, **given: Any) -> Tensor:
    return torch.addmm(self, mat1.to(out_dtype), mat2.to(out_dtype), **given)


BLOCKS = {(3, 1): (1, 32), (4, 0): (1, 128), (5, 0): (128, 128)}
"""Torch's numbers of a recipe of scales and of their order -> rows and columns that share a scale."""


def _from_tiles(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Order scales of 1 x 32 blocks that lie in tiles of 128 rows x 4: number 16 (r mod 32) + 4 (r div 32) + c in a tile."""
    down, across = -(-rows // 128), -(-columns // 4)
    tiles = scales.flatten()[: down * across * 512].float().view(down, across, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(down * 128, across * 4)[:rows, :columns]


def _scaled(x: Tensor, scale: Sequence[Tensor], recipe: Sequence[int], swizzle: Sequence[int]) -> Tensor:
    """Multiply rows [rows, contraction] in FP8 with their scales, in fp32."""
    rows, contraction = x.shape
    down, across = BLOCKS[recipe[0], swizzle[0]]
    scales = _from_tiles(scale[0], rows, contraction // across) if swizzle[0] else scale[0].float()
    # Those of squares come as [contraction / 128, padded to 4; rows / 128].
    scales = scales.t() if down > 1 else scales
    return x.float() * scales.repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)[:, :contraction]


@form_of("aten._scaled_mm_v2.default")
def scaled_product(self: Tensor, mat2: Tensor, bias: Tensor | None, **given: Any) -> Tensor:
    left, right = (
        _scaled(x, given[f"scale_{side}"], given[f"recipe_{side}"], given[f"swizzle_{side}"])
        for side, x in (("a", self), ("b", mat2.t()))
    )
    found = left @ right.t()
    return found if bias is None else found + bias.float()


# ---- attention. query, key, value [b, heads, s, d]; the logarithms of the softmax's sums, lse [b, heads, s], in fp32
def _hidden(queries: int, keys: int, causal: bool, left: int | None, right: int | None) -> Tensor:
    """Mark the keys that a query does not see; the last query is at the last key."""
    at = torch.arange(queries)[:, None] + (keys - queries)
    key = torch.arange(keys)[None]
    hidden = key > at if causal else torch.zeros(queries, keys, dtype=torch.bool)
    if left is not None and left >= 0:
        hidden = hidden | (key < at - left)
    if right is not None and right >= 0:
        hidden = hidden | (key > at + right)
    return hidden


def _scores(
    query: Tensor,
    key: Tensor,
    is_causal: bool,
    scale: float | None,
    attn_bias: Tensor | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, float]:
    """Return the scores [b, heads, s, s], -inf where a query sees no key, and the scale in them."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.mT * scale
    if attn_bias is not None:
        scores = scores + attn_bias.float()
    hidden = _hidden(*scores.shape[-2:], is_causal, window_size_left, window_size_right)
    return scores.masked_fill(hidden, -math.inf), scale


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(scores - lse[..., None]).nan_to_num(0)


def _per_head(query: Tensor, *others: Tensor) -> list[Tensor]:
    """Repeat keys and values for the query heads that share them, in fp32."""
    return [each.float().repeat_interleave(query.shape[1] // each.shape[1], 1) for each in others]


def attend(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Return attention's output and lse."""
    keys, of_values = _per_head(query, key, value)
    scores, _ = _scores(query.float(), keys, **given)
    lse = scores.logsumexp(-1)
    return _weights(scores, lse) @ of_values, lse


@form_of("aten._scaled_dot_product_flash_attention_backward.default")
def attend_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, **given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value from the given output and lse; a sink changes both."""
    keys, of_values = _per_head(query, key, value)
    queries, grad = query.float(), grad_out.float()
    scores, scale = _scores(queries, keys, **given)
    weights = _weights(scores, logsumexp)
    of_scores = weights * (grad @ of_values.mT - (grad * out.float()).sum(-1, keepdim=True)) * scale

    def shared(each: Tensor) -> Tensor:
        return each.unflatten(1, (key.shape[1], -1)).sum(2)

    return of_scores @ keys, shared(of_scores.mT @ queries), shared(weights.mT @ grad)


NO_STATE = (None,) * 7
"""Lengths, seeds and masks that come with the output of a kernel; the CPU has none to write."""


@form_of("aten._scaled_dot_product_flash_attention.default")
def flash(**given: Any) -> Any:
    return *attend(**given), *NO_STATE


@form_of("aten._scaled_dot_product_cudnn_attention.default")
def cudnn(**given: Any) -> Any:
    out, lse = attend(**given)
    return out, lse.unsqueeze(-1), *NO_STATE


@form_of("aten._scaled_dot_product_cudnn_attention_backward.default")
def cudnn_backward(logsumexp: Tensor, **given: Any) -> Any:
    return attend_backward(logsumexp=logsumexp[..., 0], **given)


@form_of("aten._scaled_dot_product_efficient_attention.default")
def efficient(compute_log_sumexp: bool, **given: Any) -> Any:
    out, lse = attend(**given)
    padded = pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
    return out, padded if compute_log_sumexp else None, None, None


@form_of("aten._scaled_dot_product_efficient_attention_backward.default")
def efficient_backward(grad_out_: Tensor, query: Tensor, logsumexp: Tensor, **given: Any) -> Any:
    lse = logsumexp[..., : query.shape[2]]
    return *attend_backward(grad_out=grad_out_, query=query, logsumexp=lse, **given), None


# Flash attention as torch's private operators have it: [b, s, heads, d], or documents in a row [tokens, heads, d]
def _documents(of_queries: Tensor, of_keys: Tensor) -> list[tuple[slice, slice]]:
    pairs = zip(pairwise(of_queries.tolist()), pairwise(of_keys.tolist()), strict=True)
    return [(slice(*queries), slice(*keys)) for queries, keys in pairs if queries[1] > queries[0]]


def _alone(tensor: Tensor, part: slice) -> Tensor:
    """Return a document's tokens as [1, heads, s, d]."""
    return tensor[part].transpose(0, 1)[None]


@form_of("aten._flash_attention_forward.default")
def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, **given: Any
) -> Any:
    if cum_seq_q is None or cum_seq_k is None:
        out, lse = attend(*(each.transpose(1, 2) for each in (query, key, value)), **given)
        return out.transpose(1, 2), lse, None, None, None
    out, lse = torch.zeros(query.shape), torch.zeros(query.shape[1], query.shape[0])
    for queries, keys in _documents(cum_seq_q, cum_seq_k):
        one, its_lse = attend(_alone(query, queries), _alone(key, keys), _alone(value, keys), **given)
        out[queries], lse[:, queries] = one[0].transpose(0, 1), its_lse[0]
    return out, lse, None, None, None


@form_of("aten._flash_attention_backward.default")
def flash_backward(logsumexp: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, **given: Any) -> Any:
    of_queries, of_keys = ("query", "out", "grad_out"), ("key", "value")
    if cum_seq_q is None or cum_seq_k is None:
        heads_first = {name: given[name].transpose(1, 2) for name in of_queries + of_keys}
        grads = attend_backward(logsumexp=logsumexp, **given | heads_first)
        return tuple(each.transpose(1, 2) for each in grads)
    grads = tuple(torch.zeros(given[name].shape) for name in ("query", "key", "value"))
    for queries, keys in _documents(cum_seq_q, cum_seq_k):
        parts = {name: _alone(given[name], queries if name in of_queries else keys) for name in of_queries + of_keys}
        found = attend_backward(logsumexp=logsumexp[:, queries][None], **given | parts)
        for to, part, one in zip(grads, (queries, keys, keys), found, strict=True):
            to[part] += one[0].transpose(0, 1)
    return grads
