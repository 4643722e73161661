"""Computes causal attention with masks and logits that plain kernels lack.

    window      a query sees the last `window` keys, its own among them
    documents   a query sees only its own document (`engine/data/documents.py`)
    part        a rank has some of a row's queries, and all keys of the row (context parallelism)
    sinks       one learned logit per head is added in the softmax's denominator, with no value (gpt-oss)
    softcap     softcap tanh(logit / softcap) replaces the logit before the mask (Gemma 2)

No [s, s] mask is built. Memory and FLOPs grow only with the visible keys. The kernels are exact:

    CpuFlash   torch's kernel for the CPU, in any dtype
    Cudnn      cuDNN's attention for parts of a row on a GPU (`engine/kernels/cudnn_attention.py`)
    Blocks     plain operators on any device (`engine/kernels/block_attention.py`)
    Varlen     flash attention on a GPU (`engine/kernels/flash_attention.py`)
    Flex       FlexAttention, compiled for a GPU (`engine/kernels/flex_attention.py`)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate as running_sums
from typing import Any, Generic, TypeVar

import torch

from triaxis.engine.config.quantities.attention_blocks import BLOCK
from triaxis.engine.data.documents import Documents
from triaxis.engine.data.sequence_part import SequencePart
from triaxis.engine.kernels.fusion import EAGER, Fusion
from triaxis.engine.numerics.precision import accumulate, accumulation_dtype

Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Mask:
    """The restriction on the keys that each query sees, in addition to causality.

    Attributes:
        window: number of keys that a query sees, its own included; None for all keys up to its own.
        documents: documents in the keys' rows; None if each row is one document.
        part: positions of the queries in the keys' rows (context parallelism); None for the rows' last positions.
    """

    window: int | None = None
    documents: Documents | None = None
    part: SequencePart | None = None


WHOLE = Mask()
"""The plain causal mask."""


def masked_attention(
    kernel: "Kernel[Any]", q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Compute attention with autograd.

    The shapes are q [b, n, s, d], k, v [b, n_kv, s_k, d], sinks [n] or None -> [b, n, s, d].
    """
    return _Attention.apply(q, k, v, sinks, kernel)


def attend(
    kernel: "Kernel[Any]", q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the output and its log-sum-exp, both with sinks, outside autograd.

    A sink adds exp(sink) to each row's sum: lse' = log(exp(lse) + exp(sink)), out' = out exp(lse - lse'). A sink's value is zero.
    The kernel's backward is therefore correct when given out' and lse'.
    """
    out, lse = kernel.forward(q, k, v)
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype).view(-1, 1))
    return out.mul_((lse - total).exp_().unsqueeze(-1)), total


def grad_of_sinks(
    grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor | None:
    """Compute the sinks' gradient [n] = -sum_queries P sum_d(grad out), where P = exp(sink - lse).

    `out` and `lse` include the sinks, as `attend` returns them.
    """
    if sinks is None:
        return None
    share = (sinks.to(lse.dtype).view(-1, 1) - lse).exp_()
    return (share * (accumulate(grad) * out).sum(-1)).sum((0, 2)).neg_().to(sinks.dtype)


class _Attention(torch.autograd.Function):
    """Autograd function that runs the kernel's own forward and backward, and computes the sinks' gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, kernel: "Kernel[Any]"
    ) -> torch.Tensor:
        out, lse = attend(kernel, q, k, v, sinks)
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, None]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        grad_q, grad_k, grad_v = ctx.kernel.backward(grad, q, k, v, out, lse)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_of_sinks(grad, out, lse, sinks), None


ALL_ROWS = slice(None)


@dataclass(frozen=True, slots=True)
class Places:
    """Equally long token ranges. `starts` holds each range's (row or `ALL_ROWS`, start)."""

    starts: tuple[tuple[int | slice, int], ...]
    length: int

    def views(self, x: torch.Tensor) -> list[torch.Tensor]:
        """View each range's tokens in x [b, n, s, ..], as [1, n, length, ..], or [b, n, length, ..] for `ALL_ROWS`."""
        return [
            x[slice(row, row + 1) if isinstance(row, int) else row, :, start : start + self.length]
            for row, start in self.starts
        ]

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """Select each range's tokens from x [b, n, s, ..], as [ranges, n, length, ..]; a view if possible."""
        views = self.views(x)
        return views[0] if len(views) == 1 else torch.cat(views)

    def put(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Write values [ranges, n, length, ..] to the token ranges `starts` in x [b, n, s, ..]."""
        for view, part in zip(self.views(x), self._parts(values), strict=True):
            view.copy_(part)

    def add(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Add values [ranges, n, length, ..] to the token ranges `starts` in x [b, n, s, ..]."""
        for view, part in zip(self.views(x), self._parts(values), strict=True):
            view += part

    def _parts(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        return (values,) if len(self.starts) == 1 else values.split(1)

    def part(self, first: int, stop: int) -> "Places":
        """Narrow every range to its tokens `first` .. `stop - 1`, counted from the range's start."""
        return Places(tuple((row, start + first) for row, start in self.starts), stop - first)


@dataclass(frozen=True, slots=True)
class Piece:
    """The query ranges in one computation, and the ranges of the keys that at least one query sees."""

    queries: Places
    keys: Places


AnyPiece = TypeVar("AnyPiece", bound=Piece)


@dataclass(frozen=True, slots=True)
class RowPiece(Piece):
    """A piece with consecutive queries of equal documents.

    Attributes:
        position: first query's position among the keys.
        window: mask's window, or None if it hides none of the keys.
    """

    position: int
    window: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every query sees every key."""
        return self.queries.length == 1

    @property
    def is_cut(self) -> bool:
        """Whether the window hides an earlier key from some query."""
        return self.window is not None and self.keys.length > self.window


def _stretches(mask: Mask, num_queries: int, num_keys: int) -> Iterator[RowPiece]:
    """Yield pieces without a window that together cover all queries.

    Query ranges in several documents share one piece if they are equally long and begin equally far into their documents.
    """
    if mask.documents is None:
        # Without documents, all rows have the same runs, so one piece serves the batch.
        runs = ((num_keys - num_queries, num_keys),) if mask.part is None else mask.part.runs[0]
        start = 0
        for first, stop in runs:
            queries = Places(((ALL_ROWS, start),), stop - first)
            yield RowPiece(queries, Places(((ALL_ROWS, 0),), stop), first)
            start += stop - first
        return
    # (position in the document, length) -> (row, first query in the rank's part, first key of the document in the row).
    places: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for row, lengths in enumerate(mask.documents.lengths):
        ends = [*running_sums(lengths)]
        start = 0
        for first, stop in ((0, ends[-1]),) if mask.part is None else mask.part.runs[row]:
            for end, length in zip(ends, lengths, strict=True):
                low, high = max(first, end - length), min(stop, end)
                if low < high:
                    places.setdefault((low - end + length, high - low), []).append((row, start, end - length))
                    start += high - low
    for (position, length), found in places.items():
        queries = Places(tuple((row, query) for row, query, _ in found), length)
        keys = Places(tuple((row, key) for row, _, key in found), position + length)
        yield RowPiece(queries, keys, position)


def row_pieces(mask: Mask, num_queries: int, num_keys: int, block: int | None) -> Iterator[RowPiece]:
    """Yield pieces of at most `block` consecutive queries, with the keys they see.

    If `block` is None, only a window that hides keys splits a document's queries, into min(window, BLOCK) at a time.
    """
    for stretch in _stretches(mask, num_queries, num_keys):
        window = mask.window if mask.window is not None and mask.window < stretch.keys.length else None
        length = stretch.queries.length
        size = block or (length if window is None else min(window, BLOCK))
        for first in range(0, length, size):
            stop = min(first + size, length)
            position = stretch.position + first
            # The block's first query sees back to `first_key`, and later queries see no further back.
            first_key = 0 if window is None else max(0, position - window + 1)
            keys = stretch.keys.part(first_key, stretch.position + stop)
            yield RowPiece(stretch.queries.part(first, stop), keys, position - first_key, window)


class Kernel(Generic[AnyPiece]):
    """Attention without sinks, which computes consecutive queries piece by piece, with their visible keys.

    The shapes are q [b, n, s, d], k, v [b, n_kv, s_k, d]. `Blocks` and `Flex` also take values of another size than
    the keys: v [.., d_v], with output [.., d_v].

    Args:
        mask: restriction on the visible keys beyond causality.
        scale: logit factor; None means d ** -0.5.
        softcap: logit cap, or None; of the subclasses, only `Blocks` and `Flex` support a cap.
        fusion: runs the elementwise functions of `Blocks`, and `Flex`.
    """

    def __init__(self, mask: Mask, scale: float | None, softcap: float | None = None, fusion: Fusion = EAGER) -> None:
        self.mask = mask
        self.scale = scale
        self.softcap = softcap
        self.fusion = fusion

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the output [b, n, s, d] and its log-sum-exp [b, n, s] in the accumulation dtype."""
        b, n, s, _ = q.shape
        # The memory order is [s, b, n, d_v], in which the next layer reads the output.
        out = q.new_empty(s, b, n, v.shape[-1]).permute(1, 2, 0, 3)
        lse = q.new_empty(b, n, s, dtype=accumulation_dtype(q.dtype))
        for piece in self.pieces(q, k):
            found = self.part(piece, piece.queries.cut(q), piece.keys.cut(k), piece.keys.cut(v))
            piece.queries.put(out, found[0])
            piece.queries.put(lse, found[1])
        return out, lse

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> Tensors3:
        """Compute the gradients for q, k and v; those for k and v may be in the accumulation dtype.

        With sinks, `out` and `lse` are results of `attend`, not of `forward`.
        """
        wide = accumulation_dtype(q.dtype)
        grad_q = torch.empty_like(q)
        # Several pieces may add to the same key.
        grad_k, grad_v = (torch.zeros_like(each, dtype=wide) for each in (k, v))
        of_out = self.of_out(grad, out)
        for piece in self.pieces(q, k):
            grad_part, q_part, out_part, lse_part = (piece.queries.cut(each) for each in (grad, q, of_out, lse))
            k_part, v_part = (piece.keys.cut(each) for each in (k, v))
            found = self.part_backward(piece, grad_part, q_part, out_part, lse_part, k_part, v_part)
            piece.queries.put(grad_q, found[0])
            piece.keys.add(grad_k, found[1])
            piece.keys.add(grad_v, found[2])
        return grad_q, grad_k, grad_v

    def of_out(self, grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Compute what `part_backward` needs of the output [b, n, s, d]; by default, the output itself."""
        return out

    def pieces(self, q: torch.Tensor, k: torch.Tensor) -> Iterator[AnyPiece]:
        """Yield pieces that together cover all queries."""
        raise NotImplementedError

    def part(
        self, piece: AnyPiece, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the attention output and its log-sum-exp for one piece's queries."""
        raise NotImplementedError

    def part_backward(
        self,
        piece: AnyPiece,
        grad: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Tensors3:
        """Compute attention gradients for one piece's queries q, and for their keys k and values v."""
        raise NotImplementedError


class FirstKeyAligned(Kernel[RowPiece]):
    """A fused kernel whose causal mask is aligned with the first key.

    Queries that begin later in their document need two calls, and the log-sum-exps weight the two outputs.
    """

    def pieces(self, q: torch.Tensor, k: torch.Tensor) -> Iterator[RowPiece]:
        return row_pieces(self.mask, q.shape[2], k.shape[2], None)

    def part(
        self, piece: RowPiece, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = [
            self.call(q, k[:, :, keys], v[:, :, keys], mask, is_causal=is_causal)
            for keys, is_causal, mask in self._calls(piece, q)
        ]
        return found[0] if len(found) == 1 else self.fusion(_joined)(*found[0], *found[1])

    def part_backward(
        self,
        piece: RowPiece,
        grad: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Tensors3:
        # Given the log-sum-exp over all keys, each call computes its own keys' probabilities among all keys.
        # `out` is also the output over all keys, as D = rowsum(dO O) requires.
        found = [
            self.call_backward(grad, q, k[:, :, keys], v[:, :, keys], out, lse, mask, is_causal=is_causal)
            for keys, is_causal, mask in self._calls(piece, q)
        ]
        if len(found) == 1:
            return found[0]
        of_q, of_k, of_v = zip(*found, strict=True)
        return of_q[0] + of_q[1], torch.cat(of_k, dim=2), torch.cat(of_v, dim=2)

    def call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the output and its log-sum-exp [m, n, s]. `mask` is added to the logits [s, s_k]."""
        raise NotImplementedError

    def call_backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        is_causal: bool,
    ) -> Tensors3:
        """Compute the gradients for q, k and v of one call."""
        raise NotImplementedError

    @staticmethod
    def _calls(piece: RowPiece, q: torch.Tensor) -> list[tuple[slice, bool, torch.Tensor | None]]:
        """List a piece's calls, each as (keys, is causal, additive mask [queries, keys] or None)."""
        if piece.is_whole:
            return [(slice(None), False, None)]
        if piece.is_cut:
            mask = torch.zeros(piece.queries.length, piece.keys.length, dtype=q.dtype, device=q.device)
            hidden = hidden_keys(mask, piece.queries.length, piece.window)
            return [(slice(None), False, mask.masked_fill_(hidden, -torch.inf))]
        own = (slice(piece.position, None), True, None)
        return [own] if piece.position == 0 else [(slice(0, piece.position), False, None), own]


def _joined(
    before: torch.Tensor, lse_before: torch.Tensor, own: torch.Tensor, lse_own: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join attention over two sets of keys: outputs [m, n, s, d] and their log-sum-exps [m, n, s].

    The softmax over both sets is each set's softmax times its share of the sum, exp(lse_i - lse).
    """
    lse = torch.logaddexp(lse_before, lse_own)
    share_before, share_own = ((each - lse).exp_().unsqueeze(-1) for each in (lse_before, lse_own))
    return (accumulate(before) * share_before + accumulate(own) * share_own).to(own.dtype), lse


class CpuFlash(FirstKeyAligned):
    """torch's fused kernel for the CPU, which takes any float dtype and an additive mask."""

    def call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=self.scale
        )
        return found[0], found[1]

    def call_backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        is_causal: bool,
    ) -> Tensors3:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(grad, q, k, v, out, lse, 0.0, is_causal), attn_mask=mask, scale=self.scale
        )


def hidden_keys(like: torch.Tensor, queries: int, window: int | None) -> torch.Tensor:
    """Mark the keys that a query does not see, bool [rows, keys] as `like`. Each `queries` rows in turn end at the last key."""
    rows, num_keys = like.shape
    keys = torch.arange(num_keys, device=like.device)
    at = (torch.arange(rows, device=like.device) % queries + (num_keys - queries)).unsqueeze(1)
    hidden = keys > at
    return hidden if window is None else hidden | (keys <= at - window)
