"""Queries, keys and values as attention reads them, from one projection; and back, their gradients as one.

    forward    [s, b, (heads + 2 kv_heads) d] -> q [s, b, heads, d], k and v [s, b, kv_heads, d]; q and k rotated where they are
    backward   the gradients rotated back, side by side, and the sum over tokens for a bias

Operator by operator these are a rotation of q, one of k, a concatenation and a sum, each with passes over memory of its own.
Compiled, each direction is one kernel.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from triaxis.engine.kernels.bias_total import AddTotal, total_of
from triaxis.engine.kernels.fusion import Fusion
from triaxis.engine.kernels.rotary import rope, rope_backward, rope_backward_


class SplitQkv:
    """The split of projected tokens into queries, keys and values.

    Args:
        heads: the numbers of query heads and of key/value heads.
        head_dim: d.
        fusion: runs the two functions.
        add_total: called in the backward with the gradient of x summed over its tokens, the gradient of a bias.
    """

    def __init__(self, heads: tuple[int, int], head_dim: int, fusion: Fusion, add_total: AddTotal = None) -> None:
        of_q, of_k = heads
        self.heads, self.head_dim = (of_q, of_k, of_k), head_dim
        self.rotated = fusion(_rotated)
        joined = _joined if fusion.is_compiled else _joined_in_place
        self.joined: Callable[..., Any] = fusion(joined)
        if add_total is not None:
            self.joined = partial(fusion(_and_total), joined)
        self.add_total = add_total

    def __call__(self, x: torch.Tensor, tables: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split x [s, b, (heads + 2 kv_heads) d], the queries, keys and values of each token side by side.

        Args:
            x: as above.
            tables: of `rope_tables`, by which queries and keys are rotated; None: they are views of x, as the values always are.

        Returns:
            q [s, b, heads, d], k and v [s, b, kv_heads, d].
        """
        return _SplitQkv.apply(x, tables, self)


class _SplitQkv(torch.autograd.Function):
    """The split and the concatenation. Saves the tables, one for all layers, and no more."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, tables: torch.Tensor | None, split: SplitQkv
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.split = split
        ctx.save_for_backward(*([] if tables is None else [tables]))
        q, k, v = x.view(*x.shape[:2], -1, split.head_dim).split_with_sizes(split.heads, dim=2)
        if tables is not None:
            q, k = split.rotated(q, k, tables)
        return q, k, v

    @staticmethod
    def backward(
        ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        split: SplitQkv = ctx.split
        grads = (grad_q, grad_k, grad_v, *ctx.saved_tensors)
        if split.add_total is None:
            return split.joined(*grads), None, None
        grad, total = split.joined(*grads)
        split.add_total(total)
        return grad, None, None


def _rotated(q: torch.Tensor, k: torch.Tensor, tables: torch.Tensor) -> Sequence[torch.Tensor]:
    return rope(q, tables), rope(k, tables)


def _joined(
    grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor, tables: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the gradients [s, b, .., d] side by side, [s, b, (heads + 2 kv_heads) d]; the tables rotate those of q and k back."""
    if tables is not None:
        grad_q, grad_k = rope_backward(grad_q, tables), rope_backward(grad_k, tables)
    return torch.cat((grad_q, grad_k, grad_v), dim=2).flatten(2)


def _joined_in_place(
    grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor, tables: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the same; eager code rotates q and k together, in their place."""
    whole = torch.cat((grad_q, grad_k, grad_v), dim=2)
    if tables is not None:
        # Where the tables have fewer elements than a head, those behind them stay.
        rope_backward_(whole[:, :, : grad_q.shape[2] + grad_k.shape[2], : tables.shape[-1]], tables)
    return whole.flatten(2)


def _and_total(joined: Callable[..., torch.Tensor], *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of x, and its sum over the tokens."""
    grad = joined(*grads)
    return grad, total_of(grad)
