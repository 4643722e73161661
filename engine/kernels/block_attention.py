"""Computes attention in plain operators, with one query block's scores in memory at a time, on any device (2205.14135)."""

from collections.abc import Iterator

import torch

from triaxis.engine.config.quantities.attention_blocks import BLOCK, block_size
from triaxis.engine.kernels.masked_attention import Kernel, RowPiece, Tensors3, hidden_keys, row_pieces
from triaxis.engine.numerics.precision import accumulate


class Blocks(Kernel[RowPiece]):
    """Attention, one block of queries at a time. The backward recomputes each block's probabilities."""

    def pieces(self, q: torch.Tensor, k: torch.Tensor) -> Iterator[RowPiece]:
        (b, n, s, _), num_keys = q.shape, k.shape[2]
        return row_pieces(self.mask, s, num_keys, block_size(b * n, s, num_keys, BLOCK))

    def of_out(self, grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Compute D = rowsum(dO O), [b, n, s]."""
        return self.fusion(_row_sums)(grad, out)

    def part(
        self, piece: RowPiece, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        products = self._by_group(q, k) @ k.transpose(-1, -2)
        weigh = self.fusion(_weigh, lengths="all")
        weights, lse = weigh(products.flatten(0, 2), q.shape[2], piece.window, self._factor(q), self.softcap)
        return (weights.view_as(products) @ v).reshape(*q.shape[:3], v.shape[-1]), lse.view(q.shape[:3])

    def part_backward(
        self,
        piece: RowPiece,
        grad: torch.Tensor,
        q: torch.Tensor,
        d: torch.Tensor,
        lse: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Tensors3:
        grad, by_group = (self._by_group(each, k) for each in (grad, q))
        products, of_weights = by_group @ k.transpose(-1, -2), grad @ v.transpose(-1, -2)
        weigh_backward = self.fusion(_weigh_backward, lengths="all")
        of_products, weights = weigh_backward(
            *(products.flatten(0, 2), of_weights.flatten(0, 2), lse.reshape(-1), d.reshape(-1)),
            *(q.shape[2], piece.window, self._factor(q), self.softcap),
        )
        of_products, weights = of_products.view_as(products), weights.view_as(products)
        return (
            (of_products @ k).reshape(q.shape),
            of_products.transpose(-1, -2) @ by_group,
            weights.transpose(-1, -2) @ grad,
        )

    def _factor(self, q: torch.Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @staticmethod
    def _by_group(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Reshape x [m, n, s, ..] to [m, n_kv, (n / n_kv) s, ..], one matrix per key/value head."""
        m, n, s = x.shape[:3]
        return x.reshape(m, k.shape[1], n // k.shape[1] * s, *x.shape[3:])


def _weigh(
    products: torch.Tensor, queries: int, window: int | None, factor: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax's weights [rows, keys] and log-sum-exps [rows] from the products q k^T [rows, keys].

    Args:
        products: each `queries` rows in turn are the block's queries, the last of which is at the last key.
        queries: number of queries in the block.
        window: number of keys that a query sees; None: all up to its own.
        factor: of the logits.
        softcap: cap of the logits, or None.
    """
    logits = _logits(products, factor, softcap).masked_fill_(hidden_keys(products, queries, window), -torch.inf)
    lse = logits.logsumexp(-1, keepdim=True)
    return logits.sub_(lse).exp_().to(products.dtype), lse.squeeze(-1)


def _weigh_backward(
    products: torch.Tensor,
    of_weights: torch.Tensor,
    lse: torch.Tensor,
    d: torch.Tensor,
    queries: int,
    window: int | None,
    factor: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the products' gradient and the weights, both [rows, keys].

    Flash attention's backward: dS = P (dP - D), where dP = dO V^T is `of_weights`, and D = rowsum(dO O) is `d` [rows]. A cap's
    slope is 1 - tanh^2.
    """
    logits = _logits(products, factor, softcap)
    weights = (logits - lse.unsqueeze(-1)).exp_().masked_fill_(hidden_keys(products, queries, window), 0.0)
    slope = 1.0 if softcap is None else 1 - (logits / softcap).square_()
    of_products = (weights * (accumulate(of_weights) - d.unsqueeze(-1)) * slope).to(products.dtype)
    return of_products.mul_(factor), weights.to(products.dtype)


def _row_sums(grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return (accumulate(grad) * out).sum(-1)


def _logits(products: torch.Tensor, factor: float, softcap: float | None) -> torch.Tensor:
    """Compute the unmasked logits in the accumulation dtype."""
    logits = accumulate(products) * factor
    return logits if softcap is None else (logits / softcap).tanh_() * softcap
