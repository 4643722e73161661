"""Causal attention with a window, documents or sinks, from kernels that know none of them.

    window      a query sees the last `window` keys, its own among them: keys > query - window
    documents   a query sees its own document (`engine/data/documents.py`)
    part        the queries are some stretches of a row, the keys all of it (context parallelism)
    sinks       one learned logit per head in the softmax's denominator, with no value (gpt-oss)
    softcap     logits are capped, softcap tanh(logit / softcap), before the mask (Gemma 2)

No mask of [s, s] exists: stretches of tokens that see each other are computed apart, a window in blocks of queries against the keys
that some of them see. So memory and FLOPs are those of what is seen. The kernels, all exact:

    CpuFlash   torch's kernel for the CPU, any dtype; documents of equal length in one call
    Blocks     plain operators on any device: scores of one block of queries exist at a time, in the forward and the backward
    Varlen     flash attention on a GPU (`engine/kernels/flash_attention.py`)

One autograd function keeps q, k, v, the output and the logarithm of each row's sum, as a fused kernel does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate as running_sums
from typing import Any, Protocol

import torch

from triaxis.engine.data.documents import Documents
from triaxis.engine.data.sequence_part import SequencePart
from triaxis.engine.numerics.precision import accumulate, accumulation_dtype

Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

BLOCK = 256
"""Queries that are computed at a time where blocks are."""


@dataclass(frozen=True, slots=True)
class Mask:
    """The keys that each query sees, in addition to the causal mask.

    Attributes:
        window: keys that a query sees, its own among them; None: all before it.
        documents: of the keys' rows; None: each row is one.
        part: of the keys' rows that the queries are; None: the last positions, as many as keys, or one.
    """

    window: int | None = None
    documents: Documents | None = None
    part: SequencePart | None = None


WHOLE = Mask()
"""The causal mask alone."""


class Kernel(Protocol):
    """Attention without sinks: q [b, n, s, d], k, v [b, n_kv, s_k, d]; `Blocks` takes v [.., d_v], and its output has this size."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [b, n, s, d], and the logarithm of each row's sum [b, n, s] in the accumulation dtype."""
        ...

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> Tensors3:
        """Return the gradients of q, k and v, the last two in their dtype or in the accumulation dtype.

        `lse` may be larger than the forward's, and `out` then smaller by the same factor.
        """
        ...


def masked_attention(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Compute attention by a kernel, with sinks [n] or None: q [b, n, s, d], k, v [b, n_kv, s_k, d] -> [b, n, s, d]."""
    return _Attention.apply(q, k, v, sinks, kernel)


def attend(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the logarithms of the rows' sums, sinks among them; no gradient is recorded.

    A sink adds exp(sink) to each row's sum: lse' = log(exp(lse) + exp(sink)), out' = out exp(lse - lse'). Its value is zero, so the
    kernel's backward from out' and lse' is the right one: it has P' = exp(scores - lse') and D' = rowsum(dO out').
    """
    out, lse = kernel.forward(q, k, v)
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype).view(-1, 1))
    return out.mul_((lse - total).exp_().unsqueeze(-1)), total


def grad_of_sinks(
    grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the gradient of the sinks [n]: a sink's probability is exp(sink - lse'), times -D' summed over the rows."""
    if sinks is None:
        return None
    share = (sinks.to(lse.dtype).view(-1, 1) - lse).exp_()
    return (share * (accumulate(grad) * out).sum(-1)).sum((0, 2)).neg_().to(sinks.dtype)


class _Attention(torch.autograd.Function):
    """The kernel's own forward and backward, once each."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, kernel: Kernel
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


@dataclass(frozen=True, slots=True)
class _Places:
    """`length` tokens from each (row, start); of all rows from one start where `starts` is an int."""

    starts: tuple[tuple[int, int], ...] | int
    length: int

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens of each place: x [b, n, s, ..] -> [places, n, length, ..]."""
        if isinstance(self.starts, int):
            return x[:, :, self.starts : self.starts + self.length]
        parts = [x[row, :, start : start + self.length] for row, start in self.starts]
        return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)

    def put(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Write what `cut` would return."""
        if isinstance(self.starts, int):
            x[:, :, self.starts : self.starts + self.length] = values
            return
        for (row, start), part in zip(self.starts, values, strict=True):
            x[row, :, start : start + self.length] = part

    def add(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Add to what `cut` would return."""
        if isinstance(self.starts, int):
            x[:, :, self.starts : self.starts + self.length] += values
            return
        for (row, start), part in zip(self.starts, values, strict=True):
            x[row, :, start : start + self.length] += part

    def part(self, first: int, stop: int) -> "_Places":
        """Return tokens [first, stop) of each place."""
        if isinstance(self.starts, int):
            return _Places(self.starts + first, stop - first)
        return _Places(tuple((row, start + first) for row, start in self.starts), stop - first)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Queries that follow each other, of one document or of documents of one shape.

    Attributes:
        queries: their places among the queries.
        keys: the places of the document's keys up to the last query.
        position: of the first query among those keys.
    """

    queries: _Places
    keys: _Places
    position: int


def _stretches(mask: Mask, num_queries: int, num_keys: int) -> Iterator[_Stretch]:
    """Yield the stretches of all queries; those of equal length and position in documents are one."""
    if mask.documents is None:
        # All rows are alike: without documents each has the same runs.
        runs = ((num_keys - num_queries, num_keys),) if mask.part is None else mask.part.runs[0]
        start = 0
        for first, stop in runs:
            yield _Stretch(_Places(start, stop - first), _Places(0, stop), first)
            start += stop - first
        return
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
        queries = _Places(tuple((row, query) for row, query, _ in found), length)
        keys = _Places(tuple((row, key) for row, _, key in found), position + length)
        yield _Stretch(queries, keys, position)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries that are computed at a time, and the keys that some of them see.

    Attributes:
        queries, keys: their places.
        position: of the first query among the keys.
        window: of the mask.
    """

    queries: _Places
    keys: _Places
    position: int
    window: int | None

    @property
    def is_whole(self) -> bool:
        """Return whether every query sees every key."""
        return self.queries.length == 1

    @property
    def is_cut(self) -> bool:
        """Return whether the window hides a key from some query that comes after it."""
        return self.window is not None and self.keys.length > self.window

    def seen(self, device: torch.device) -> torch.Tensor:
        """Return which keys each query sees, bool [queries, keys]."""
        queries = torch.arange(self.position, self.keys.length, device=device).unsqueeze(1)
        keys = torch.arange(self.keys.length, device=device)
        seen = keys <= queries
        return seen if self.window is None else seen & (keys > queries - self.window)


def _pieces(mask: Mask, num_queries: int, num_keys: int, block: int | None) -> Iterator[_Piece]:
    """Yield the pieces of an attention, with at most `block` queries each; None: blocks only where there is a window."""
    for stretch in _stretches(mask, num_queries, num_keys):
        window = mask.window if mask.window is not None and mask.window < stretch.keys.length else None
        length = stretch.queries.length
        size = block or (length if window is None else min(window, BLOCK))
        for first in range(0, length, size):
            stop = min(first + size, length)
            position = stretch.position + first
            first_key = 0 if window is None else max(0, position - window + 1)
            keys = stretch.keys.part(first_key, stretch.position + stop)
            yield _Piece(stretch.queries.part(first, stop), keys, position - first_key, window)


class _ByPieces:
    """A kernel that computes pieces one after the other.

    Args:
        mask: the keys that are seen.
        scale: factor of the logits; None: d ** -0.5.
        softcap: cap of the logits, which `Blocks` alone has; None: none.
    """

    block: int | None = None
    """Queries of a piece; None: all, but with a window."""

    def __init__(self, mask: Mask, scale: float | None, softcap: float | None = None) -> None:
        self.mask = mask
        self.scale = scale
        self.softcap = softcap

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b, n, s, _ = q.shape
        # In memory as the next layer reads it, [s, b, n d].
        out = q.new_empty(s, b, n, v.shape[-1]).permute(1, 2, 0, 3)
        lse = q.new_empty(b, n, s, dtype=accumulation_dtype(q.dtype))
        for piece in _pieces(self.mask, s, k.shape[2], self.block):
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
        wide = accumulation_dtype(q.dtype)
        grad_q = torch.empty_like(q)
        # Several pieces add to one key.
        grad_k, grad_v = (torch.zeros_like(each, dtype=wide) for each in (k, v))
        for piece in _pieces(self.mask, q.shape[2], k.shape[2], self.block):
            grad_part, q_part, out_part, lse_part = (piece.queries.cut(each) for each in (grad, q, out, lse))
            k_part, v_part = (piece.keys.cut(each) for each in (k, v))
            found = self.part_backward(piece, grad_part, q_part, out_part, lse_part, k_part, v_part)
            piece.queries.put(grad_q, found[0])
            piece.keys.add(grad_k, found[1])
            piece.keys.add(grad_v, found[2])
        return grad_q, grad_k, grad_v

    def part(
        self, piece: _Piece, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and logarithms of a piece."""
        raise NotImplementedError

    def part_backward(
        self,
        piece: _Piece,
        grad: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Tensors3:
        """Return the gradients of a piece's q, k and v."""
        raise NotImplementedError


class CpuFlash(_ByPieces):
    """torch's fused kernel for the CPU, which takes any float dtype and an additive mask.

    Its causal mask begins at the first key. Queries that come later in their document see the keys before them whole, and their
    own by that mask: two calls, whose outputs are one by their logarithms.
    """

    def part(
        self, piece: _Piece, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k[:, :, keys], v[:, :, keys], 0.0, is_causal, attn_mask=mask, scale=self.scale
            )
            for keys, is_causal, mask in self._calls(piece, q)
        ]
        if len(found) == 1:
            return found[0]
        (before, lse_before), (own, lse_own) = found
        lse = torch.logaddexp(lse_before, lse_own)
        before, own = accumulate(before), accumulate(own)
        out = before * (lse_before - lse).exp_().unsqueeze(-1) + own * (lse_own - lse).exp_().unsqueeze(-1)
        return out.to(q.dtype), lse

    def part_backward(
        self,
        piece: _Piece,
        grad: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Tensors3:
        # Each call has the probabilities of its keys among all, from the logarithms of all.
        found = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(grad, q, k[:, :, keys], v[:, :, keys], out, lse, 0.0, is_causal), attn_mask=mask, scale=self.scale
            )
            for keys, is_causal, mask in self._calls(piece, q)
        ]
        if len(found) == 1:
            return found[0]
        of_q, of_k, of_v = zip(*found, strict=True)
        return of_q[0] + of_q[1], torch.cat(of_k, dim=2), torch.cat(of_v, dim=2)

    @staticmethod
    def _calls(piece: _Piece, q: torch.Tensor) -> list[tuple[slice, bool, torch.Tensor | None]]:
        """Return the keys of each call, whether it is causal, and an additive mask [queries, keys] where that is not all."""
        if piece.is_whole:
            return [(slice(None), False, None)]
        if piece.is_cut:
            seen = piece.seen(q.device)
            mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -torch.inf)
            return [(slice(None), False, mask)]
        own = (slice(piece.position, None), True, None)
        return [own] if piece.position == 0 else [(slice(0, piece.position), False, None), own]


class Blocks(_ByPieces):
    """The formula in plain operators, block by block; the backward computes each block's probabilities again (2205.14135)."""

    block = BLOCK

    def part(
        self, piece: _Piece, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._logits(q, k).masked_fill_(~self._seen(piece, q, k), -torch.inf)
        lse = logits.logsumexp(-1, keepdim=True)
        probabilities = logits.sub_(lse).exp_().to(q.dtype)
        return (probabilities @ v).reshape(*q.shape[:3], v.shape[-1]), lse.reshape(q.shape[:3])

    def part_backward(
        self,
        piece: _Piece,
        grad: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Tensors3:
        logits = self._logits(q, k)
        d = (accumulate(grad) * out).sum(-1, keepdim=True)
        lse, d, grad, by_group = (self._by_group(each, k) for each in (lse.unsqueeze(-1), d, grad, q))
        probabilities = (logits - lse).exp_().masked_fill_(~self._seen(piece, q, k), 0.0)
        slope = 1.0 if self.softcap is None else 1 - (logits / self.softcap).square_()
        grad_logits = (probabilities * (accumulate(grad @ v.transpose(-1, -2)) - d) * slope).to(q.dtype)
        grad_logits *= self._factor(q)
        return (
            (grad_logits @ k).reshape(q.shape),
            grad_logits.transpose(-1, -2) @ by_group,
            probabilities.to(q.dtype).transpose(-1, -2) @ grad,
        )

    def _logits(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return the logits [m, n_kv, group queries, keys] in the accumulation dtype, without a mask."""
        logits = accumulate(self._by_group(q, k) @ k.transpose(-1, -2)) * self._factor(q)
        return logits if self.softcap is None else (logits / self.softcap).tanh_() * self.softcap

    def _factor(self, q: torch.Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @staticmethod
    def _by_group(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return x [m, n, s, ..] as [m, n_kv, group s, ..]: the queries that share a key/value head in one matrix."""
        m, n, s = x.shape[:3]
        return x.reshape(m, k.shape[1], n // k.shape[1] * s, *x.shape[3:])

    @staticmethod
    def _seen(piece: _Piece, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return piece.seen(q.device).repeat(q.shape[1] // k.shape[1], 1)
