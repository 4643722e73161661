"""Runs flash attention on a GPU in bf16 and fp16, with windows, documents and parts of rows.

A dense call takes whole rows. A packed call takes documents of any length, one after the other. Both call the operators under
`torch.nn.attention.varlen` directly. torch's own function gives no gradient through the log-sum-exp, which sinks need.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from triaxis.engine.kernels.masked_attention import ALL_ROWS, Kernel, Mask, Piece, Places, Tensors3


@dataclass(frozen=True, slots=True)
class _Packed(Piece):
    """A piece for one call.

    Attributes:
        boundaries: document boundaries among the queries and among the keys, packed end to end; None: each row is one document.
        longest: maximum queries and maximum keys in a document.
    """

    boundaries: tuple[torch.Tensor, torch.Tensor] | None
    longest: tuple[int, int]


class Varlen(Kernel[_Packed]):
    """Flash attention on a GPU, for whole rows in one call, or for each run of a rank's queries (context parallelism).

    The kernel's causal mask is aligned with a document's last query and last key (flash attention from 2.1 on). The kernel cannot
    cap logits.
    """

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.mask.part is None:  # without a copy into place
            return self.part(self._whole(q.shape[2]), q, k, v)
        return super().forward(q, k, v)

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> Tensors3:
        if self.mask.part is None:
            return self.part_backward(self._whole(q.shape[2]), grad, q, out, lse, k, v)
        return super().backward(grad, q, k, v, out, lse)

    def pieces(self, q: torch.Tensor, k: torch.Tensor) -> Iterator[_Packed]:
        assert self.mask.part is not None
        for each in self.mask.part.stretches:
            queries, keys = (
                Places(((ALL_ROWS if each.row is None else each.row, start),), stop - start)
                for start, stop in (each.queries, each.keys)
            )
            yield _Packed(queries, keys, each.boundaries, each.longest)

    def _whole(self, s: int) -> _Packed:
        rows, documents = Places(((ALL_ROWS, 0),), s), self.mask.documents
        if documents is None:
            return _Packed(rows, rows, None, (s, s))
        return _Packed(rows, rows, (documents.boundaries,) * 2, (documents.longest,) * 2)

    def part(
        self, piece: _Packed, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        b, options = len(q), flash_options(self.mask, self.scale)
        q, k, v = (_for_kernel(each, piece) for each in (q, k, v))
        out, lse = flash_forward(q, k, v, piece.boundaries, piece.longest, **options)
        if piece.boundaries is not None:  # [n, b s]
            lse = lse.unflatten(1, (b, -1)).transpose(0, 1)
        return _from_kernel(out, piece, b), lse

    def part_backward(
        self,
        piece: _Packed,
        grad: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Tensors3:
        b, options = len(q), flash_options(self.mask, self.scale)
        if piece.boundaries is not None:
            lse = lse.transpose(0, 1).flatten(1)
        grad, q, k, v, out = (_for_kernel(each, piece) for each in (grad, q, k, v, out))
        found = flash_backward(grad, q, k, v, out, lse.contiguous(), piece.boundaries, piece.longest, **options)
        grad_q, grad_k, grad_v = (_from_kernel(each, piece, b) for each in found)
        return grad_q, grad_k, grad_v


def _for_kernel(x: torch.Tensor, piece: _Packed) -> torch.Tensor:
    """Reshape x [b, n, s, d] to [b, s, n, d], or to [b s, n, d] if documents are packed."""
    x = x.transpose(1, 2)
    return x if piece.boundaries is None else x.flatten(0, 1)


def _from_kernel(x: torch.Tensor, piece: _Packed, b: int) -> torch.Tensor:
    """Reshape the kernel's result x, [b, s, n, d] or [b s, n, d], to [b, n, s, d]."""
    return (x if piece.boundaries is None else x.unflatten(0, (b, -1))).transpose(1, 2)


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
