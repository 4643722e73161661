"""Splits one projection into queries, keys and values, and rotates queries and keys.

    forward    [s, b, (heads + 2 kv_heads) d] -> q [s, b, heads, d], k and v [s, b, kv_heads, d]; RoPE rotates q and k
    backward   rotates the gradients of q and k back, and concatenates all three gradients

Compiled, the backward is one kernel, and so is a forward in place. A forward with copies has one if there are as many keys as
queries, else each of the two has its own. In eager mode each operation is a pass over memory.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from triaxis.engine.kernels.bias_total import AddTotal, adding, total_of
from triaxis.engine.kernels.fusion import Fusion
from triaxis.engine.kernels.rotary import rope, rope_, rope_backward, rope_backward_


class SplitQkv:
    """The function that splits projected tokens into queries, keys and values.

    Args:
        heads: numbers of query heads and of key/value heads on this rank.
        head_dim: head size d.
        fusion: runs the rotation and the backward, eagerly or compiled.
        copies: whether rotated queries and keys are new tensors. If False, they overwrite the projection's output, so no autograd
            function may have saved it.
        add_total: function (bias gradient), called in the backward; the bias gradient is x's gradient summed over tokens. None if
            no sum is wanted.
    """

    def __init__(
        self, heads: tuple[int, int], head_dim: int, fusion: Fusion, add_total: AddTotal = None, *, copies: bool = True
    ) -> None:
        of_q, of_k = heads
        self.heads, self.head_dim = (of_q, of_k, of_k), head_dim
        self.turn: Callable[..., Any] = fusion(_rotated) if copies else fusion(rope_)
        self.rotated = self._copied if copies else self._in_place
        joined = _joined if fusion.is_compiled else _joined_in_place
        self.joined: Callable[..., Any] = fusion(joined)
        if add_total is not None:
            self.joined = adding(partial(fusion(_and_total), joined), add_total)

    def __call__(self, x: torch.Tensor, tables: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split x [s, b, (heads + 2 kv_heads) d] into queries, keys and values.

        Each token has all its queries first, then its keys, then its values.

        Args:
            x: the projection's output.
            tables: result of `rope_tables`, which rotates queries and keys; None: the results are unrotated views into x.

        Returns:
            q [s, b, heads, d], k and v [s, b, kv_heads, d].
        """
        return _SplitQkv.apply(x, tables, self)

    def parts(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return x's queries, keys and values, as views."""
        return x.view(*x.shape[:2], -1, self.head_dim).split_with_sizes(self.heads, dim=2)

    def _copied(self, x: torch.Tensor, tables: torch.Tensor) -> Sequence[torch.Tensor]:
        q, k, v = self.parts(x)
        return *self.turn(q, k, tables), v

    def _in_place(self, x: torch.Tensor, tables: torch.Tensor) -> Sequence[torch.Tensor]:
        # Queries and keys lie side by side, and turn alike.
        of_q, of_k, _ = self.heads
        both = x.view(*x.shape[:2], -1, self.head_dim)[:, :, : of_q + of_k, : tables.shape[-1]]
        self.turn(*both.chunk(2, dim=-1), tables)
        return self.parts(x)


class _SplitQkv(torch.autograd.Function):
    """Autograd function for the split; its backward concatenates the three gradients. It saves only RoPE's tables."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, tables: torch.Tensor | None, split: SplitQkv
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.split = split
        ctx.save_for_backward(*([] if tables is None else [tables]))
        q, k, v = split.parts(x) if tables is None else split.rotated(x, tables)
        return q, k, v

    @staticmethod
    def backward(
        ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        return ctx.split.joined(grad_q, grad_k, grad_v, *ctx.saved_tensors), None, None


def _rotated(q: torch.Tensor, k: torch.Tensor, tables: torch.Tensor) -> Sequence[torch.Tensor]:
    return rope(q, tables), rope(k, tables)


def _joined(
    grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor, tables: torch.Tensor | None = None
) -> torch.Tensor:
    """Concatenate gradients [s, b, .., d] to [s, b, (heads + 2 kv_heads) d].

    If tables are given, the gradients for q and k are rotated back first.
    """
    if tables is not None:
        grad_q, grad_k = rope_backward(grad_q, tables), rope_backward(grad_k, tables)
    return torch.cat((grad_q, grad_k, grad_v), dim=2).flatten(2)


def _joined_in_place(
    grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor, tables: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `_joined`: concatenate the gradients for q, k and v, then rotate q's and k's back in place."""
    whole = torch.cat((grad_q, grad_k, grad_v), dim=2)
    if tables is not None:
        # With partial RoPE the tables are narrower than a head, and the elements after them are not rotated.
        rope_backward_(whole[:, :, : grad_q.shape[2] + grad_k.shape[2], : tables.shape[-1]], tables)
    return whole.flatten(2)


def _and_total(joined: Callable[..., torch.Tensor], *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the gradients for q, k and v; return the result and its sum over tokens."""
    grad = joined(*grads)
    return grad, total_of(grad)
