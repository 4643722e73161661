"""Runs flash attention on a GPU in bf16 and fp16, with windows, documents and parts of rows.

A dense call takes whole rows. A packed call takes documents of any length, one after the other. Both call the operators under
`torch.nn.attention.varlen` directly. torch's own function gives no gradient through the log-sum-exp, which sinks need.
"""

from dataclasses import dataclass
from typing import Any

import torch

from triaxis.engine.data.sequence_part import RowStretch
from triaxis.engine.kernels.masked_attention import Mask, Tensors3
from triaxis.engine.numerics.precision import accumulation_dtype


def varlen(mask: Mask, scale: float | None, softcap: None) -> "Varlen | VarlenParts":
    """Build `VarlenParts` if a rank has only part of each sequence's queries (`mask.part`), else `Varlen`.

    `softcap` is always None, since the kernel cannot cap logits.
    """
    return Varlen(mask, scale) if mask.part is None else VarlenParts(mask, scale)


@dataclass(frozen=True, slots=True)
class Varlen:
    """Flash attention for a rank that has whole sequences. With documents in the mask, they are packed end to end."""

    mask: Mask
    scale: float | None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b, _, s, _ = q.shape
        out, lse = flash_forward(self._packed(q), self._packed(k), self._packed(v), *self._bounds(s), **self._options())
        if self.mask.documents is not None:  # packed: [n, b s]
            lse = lse.unflatten(1, (b, s)).transpose(0, 1)
        return self._unpacked(out, b), lse

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> Tensors3:
        b, _, s, _ = q.shape
        if self.mask.documents is not None:
            lse = lse.transpose(0, 1).flatten(1)
        grad, q, k, v, out = (self._packed(each) for each in (grad, q, k, v, out))
        bounds, options = self._bounds(s), self._options()
        grad_q, grad_k, grad_v = flash_backward(grad, q, k, v, out, lse.contiguous(), *bounds, **options)
        return self._unpacked(grad_q, b), self._unpacked(grad_k, b), self._unpacked(grad_v, b)

    def _packed(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape x [b, n, s, d] to [b, s, n, d], or to [b s, n, d] with documents."""
        x = x.transpose(1, 2)
        return x if self.mask.documents is None else x.flatten(0, 1)

    def _unpacked(self, x: torch.Tensor, b: int) -> torch.Tensor:
        x = x if self.mask.documents is None else x.unflatten(0, (b, -1))
        return x.transpose(1, 2)

    def _bounds(self, s: int) -> "_Bounds":
        """Return the documents' boundaries and longest length, each as a pair for (queries, keys).

        If the mask has no documents, return (None, (s, s)).
        """
        documents = self.mask.documents
        if documents is None:
            return None, (s, s)
        return (documents.boundaries, documents.boundaries), (documents.longest, documents.longest)

    def _options(self) -> dict[str, Any]:
        return flash_options(self.mask, self.scale)


@dataclass(frozen=True, slots=True)
class VarlenParts:
    """Flash attention in context parallelism: a rank has some queries and all keys of a sequence.

    Each contiguous run of queries takes one call.

    The kernel's causal mask is aligned with a document's last query and last key (flash attention from 2.1 on).
    """

    mask: Mask
    scale: float | None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b, n, s, d = q.shape
        out = q.new_empty(s, b, n, d).permute(1, 2, 0, 3)
        lse = q.new_empty(b, n, s, dtype=accumulation_dtype(q.dtype))
        for stretch in self._stretches():
            mine, whole = (_of_stretch(stretch, run) for run in (stretch.queries, stretch.keys))
            found = flash_forward(
                *(mine.cut(q), whole.cut(k), whole.cut(v), stretch.boundaries, stretch.longest),
                **flash_options(self.mask, self.scale),
            )
            mine.put(out, found[0])
            mine.put_logarithms(lse, found[1])
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
        grad_q = torch.empty_like(q)
        # Several stretches may add to the same key.
        wide = accumulation_dtype(q.dtype)
        grad_k, grad_v = (torch.zeros_like(each, dtype=wide) for each in (k, v))
        for stretch in self._stretches():
            mine, whole = (_of_stretch(stretch, run) for run in (stretch.queries, stretch.keys))
            found = flash_backward(
                *(mine.cut(grad), mine.cut(q), whole.cut(k), whole.cut(v), mine.cut(out), mine.cut_logarithms(lse)),
                *(stretch.boundaries, stretch.longest),
                **flash_options(self.mask, self.scale),
            )
            mine.put(grad_q, found[0])
            whole.add(grad_k, found[1])
            whole.add(grad_v, found[2])
        return grad_q, grad_k, grad_v

    def _stretches(self) -> tuple[RowStretch, ...]:
        assert self.mask.part is not None, "whole rows have a kernel of their own"
        return self.mask.part.stretches


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens [start, stop) as the kernel reads them, [tokens, n, d] in one row or [b, tokens, n, d] in all rows."""

    row: int | slice
    run: tuple[int, int]

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """View the tokens at positions `run` in x [b, n, s, d], as [tokens, n, d] or [b, tokens, n, d]."""
        return self._part(x).transpose(-3, -2)

    def put(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Write values, [tokens, n, d] or [b, tokens, n, d], to positions `run` in x [b, n, s, d]."""
        self._part(x).copy_(values.transpose(-3, -2))

    def add(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Add values, [tokens, n, d] or [b, tokens, n, d], to positions `run` in x [b, n, s, d]."""
        self._part(x).add_(values.transpose(-3, -2))

    def put_logarithms(self, lse: torch.Tensor, values: torch.Tensor) -> None:
        """Write log-sum-exps, [n, tokens] or [b, n, tokens], to positions `run` in lse [b, n, s]."""
        self._part(lse).copy_(values)

    def cut_logarithms(self, lse: torch.Tensor) -> torch.Tensor:
        """Select positions `run` in lse [b, n, s], contiguous as the kernel requires: [n, tokens] or [b, n, tokens]."""
        return self._part(lse).contiguous()

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.row, :, self.run[0] : self.run[1]]


def _of_stretch(stretch: RowStretch, run: tuple[int, int]) -> _Tokens:
    return _Tokens(slice(None) if stretch.row is None else stretch.row, run)


_Bounds = tuple[tuple[torch.Tensor, torch.Tensor] | None, tuple[int, int]]
"""Document boundaries among queries and among keys (None for whole rows), and each one's longest document."""


def flash_options(mask: Mask, scale: float | None) -> dict[str, Any]:
    """Return `flash_forward`'s options: the scale, and how many keys a query sees on its left and its right."""
    # The kernel counts keys to the left of the query, which also sees itself; -1 means all.
    left = -1 if mask.window is None else mask.window - 1
    return {"scale": scale, "window_size_left": left, "window_size_right": 0}


def flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    boundaries: tuple[torch.Tensor, torch.Tensor] | None,
    longest: tuple[int, int],
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the kernel and compute the output and its log-sum-exp.

    Args:
        q, k, v: operands [b, s, n, d] or [tokens, n, d]; with more keys than queries, the queries are at the last positions.
        boundaries: document boundaries among queries and among keys; None for whole rows.
        longest: maximum queries and maximum keys in a document.
        options: result of `flash_options`.

    Returns:
        The output in q's shape, and the log-sum-exp, fp32 [b, n, s] or [n, tokens].
    """
    is_causal = options["window_size_left"] < 0
    of_queries, of_keys = (None, None) if boundaries is None else boundaries
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, of_queries, of_keys, *longest, 0.0, is_causal, False, **options
    )
    return found[0], found[1]


def flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    boundaries: tuple[torch.Tensor, torch.Tensor] | None,
    longest: tuple[int, int],
    **options: Any,
) -> Tensors3:
    """Compute the gradients for q, k and v by the kernel's backward; arguments as in `flash_forward`."""
    is_causal = options["window_size_left"] < 0
    # The random state for dropout, which is off.
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    of_queries, of_keys = (None, None) if boundaries is None else boundaries
    return torch.ops.aten._flash_attention_backward(
        *(grad, q, k, v, out, lse, of_queries, of_keys, *longest, 0.0, is_causal, state, unused), **options
    )
