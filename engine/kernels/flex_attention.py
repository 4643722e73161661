"""Runs FlexAttention, torch's flash attention with a formula of ours for the logits (2412.05496).

Inductor compiles the formula, with its slope for the backward, into torch's Triton template. The kernel skips blocks that the mask
hides, and masks only those that it cuts. Not compiled, torch has all scores in memory: that form is for comparisons.

torch's own function leaves the backward to autograd, behind torch.compile. Here its operators are called directly.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from triaxis.engine.kernels.masked_attention import Kernel, Piece, Tensors3

LOG_2 = math.log(2)
"""The kernel's log-sum-exps have base 2."""

BLOCK = 128
"""Queries and keys in a block of the mask: torch's default, a multiple of every tile that its kernels take."""

Table = Sequence[torch.Tensor]
"""The blocks with a visible key, by queries and then by keys: those that the mask cuts, as numbers [1, 1, blocks] and indices
[1, 1, blocks, blocks], and those that it does not, the same; int32."""

_OPTIONS = {
    "BACKEND": "TRITON",
    "PRESCALE_QK": False,  # the formula reads the logits themselves
    "ROWS_GUARANTEED_SAFE": True,  # a query sees its own key
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}
"""What `torch.nn.attention.flex_attention` tells its operators."""


class Flex(Kernel[Piece]):
    """Attention of whole rows in one call, with windows and capped logits."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.fusion(_forward)(q, k, v, self._table(q, k), *self._formula(q))

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> Tensors3:
        return self.fusion(_backward)(grad, q, k, v, out, lse, self._table(q, k), *self._formula(q))

    def _table(self, q: torch.Tensor, k: torch.Tensor) -> Table:
        assert self.mask.documents is None and self.mask.part is None, "the table is one of whole rows"
        return self.fusion.table(blocks_of, q.shape[2], k.shape[2], self.mask.window, q.device)

    def _formula(self, q: torch.Tensor) -> tuple[int | None, float, float | None]:
        return self.mask.window, q.shape[-1] ** -0.5 if self.scale is None else self.scale, self.softcap


def blocks_of(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Table:
    """Find the blocks that the mask does not hide. The last query is at the last key."""
    first_query, last_query = (each.unsqueeze(1) for each in _ends(num_queries, num_keys - num_queries))
    first_key, last_key = _ends(num_keys, 0)
    is_visible = first_key <= last_query
    # What a block has beyond the last query or key is masked.
    is_full = (last_query - first_query == BLOCK - 1) & (last_key - first_key == BLOCK - 1)
    is_whole = is_full & (last_key <= first_query)
    if window is not None:
        is_visible &= last_key > first_query - window
        is_whole &= first_key > last_query - window
    is_cut = is_visible & ~is_whole
    return [
        each[None, None].to(device)
        for is_found in (is_cut, is_whole, is_cut.T, is_whole.T)
        for each in (
            is_found.sum(-1, dtype=torch.int32),
            is_found.byte().argsort(stable=True, dim=-1, descending=True).int(),
        )
    ]


def _ends(length: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the last position of each block of `length` positions from `start` on, [blocks] each."""
    first = torch.arange(0, length, BLOCK)
    return first + start, (first + BLOCK).clamp(max=length) - 1 + start


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: Table,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from torch._higher_order_ops.flex_attention import flex_attention

    mask = _mask(q, k, table, window)
    out, lse, *_ = flex_attention(q, k, v, partial(_capped, softcap), mask, scale, {**_OPTIONS})
    return out, lse * LOG_2


def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    table: Table,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Tensors3:
    from torch._higher_order_ops.flex_attention import flex_attention_backward

    formula, slope = partial(_capped, softcap), partial(_slope, softcap)
    # torch traces the slope, though it asks for what it would have traced.
    operator: Callable[..., tuple[Any, ...]] = flex_attention_backward
    found = operator(
        *(q, k, v, out, lse / LOG_2, grad, None, formula, slope, _mask(q, k, table, window), scale, {**_OPTIONS})
    )
    return found[0], found[1], found[2]


def _mask(q: torch.Tensor, k: torch.Tensor, table: Table, window: int | None) -> tuple[Any, ...]:
    from torch.nn.attention.flex_attention import BlockMask

    lengths = q.shape[2], k.shape[2]
    made: Callable[..., BlockMask] = BlockMask
    return made(lengths, *table, (BLOCK, BLOCK), _visible(*lengths, window)).as_tuple()


def _visible(num_queries: int, num_keys: int, window: int | None) -> Callable[..., torch.Tensor]:
    first = num_keys - num_queries

    def visible(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        at = query + first
        return key <= at if window is None else (key <= at) & (key > at - window)

    return visible


def _capped(softcap: float | None, logit: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
    return logit if softcap is None else softcap * torch.tanh(logit / softcap)


def _slope(softcap: float | None, logit: torch.Tensor, *place: torch.Tensor) -> list[torch.Tensor | None]:
    """Compute the logit's gradient from the capped logit's, the last of `place`; places have none."""
    *_, grad = place
    return [grad if softcap is None else grad * (1 - torch.tanh(logit / softcap) ** 2), None, None, None, None]
