"""Normalise and rotate queries and keys, where the model does so."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from triaxis.engine.kernels.norms import NormKernel
from triaxis.engine.kernels.rotary import apply_rope
from triaxis.engine.tensor_parallel.parameter import ShardedParameter
from triaxis.engine.tensor_parallel.qk_norm import normalised, squares
from triaxis.models.gpt.context import BuildContext

Split = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""A split of x into q, k and v that can rotate with given tables (`triaxis.engine.kernels.qkv.SplitQkv`)."""


class NormalisedAndRotated(nn.Module):
    """Splits a projection's output into queries, keys and values. Queries and keys are then normalised and rotated."""

    def __init__(self, context: BuildContext, name: str, split: Split) -> None:
        super().__init__()
        self.context, self.split = context, split
        model = context.model
        self.kernel = NormKernel(model.norm_kind.of_heads, model.norm_eps, context.kernels.fusion)
        self.q_norm = context.parameter(f"{name}.q_norm.weight")
        self.k_norm = context.parameter(f"{name}.k_norm.weight")

    @classmethod
    def of(cls, context: BuildContext, name: str, split: Split) -> Split:
        """Build this module if the model has QK-norm. Otherwise return `split`, which can rotate."""
        return cls(context, name, split) if context.model.qk_norm else split

    def forward(self, x: torch.Tensor, tables: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split x into q [s, b, heads, d], k and v [s, b, kv_heads, d].

        q and k are normalised, and rotated as the model asks.
        """
        q, k, v = self.split(x, tables=None)
        over_all = self.context.model.qk_norm == "all_heads"
        q, k = self._all(q, k, tables) if over_all else self._each(q, k, tables)
        return q, k, v

    def _each(self, q: torch.Tensor, k: torch.Tensor, rope: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise each head by itself, and rotate q and k."""
        again = self.context.saved.recomputed
        q = again("rope", lambda q: self._normalise_and_rotate(q, self.q_norm, rope))(q)
        return q, again("rope", lambda k: self._normalise_and_rotate(k, self.k_norm, rope))(k)

    def _all(self, q: torch.Tensor, k: torch.Tensor, rope: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise over all of a token's heads, then rotate.

        The all-reduce over tp of the sums of squares is never recomputed.
        """
        context, model = self.context, self.context.model
        replicas = max(1, context.region.axis.size // model.kv_heads)
        sums = squares(q, k, context.region.axis, replicas, context.kernels.fusion)

        def made(which: int, norm: ShardedParameter, heads: int, x: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
            mine, count = sums[..., which : which + 1], heads * model.head_size
            fusion, offset = context.kernels.fusion, model.norm_kind.offset
            x = normalised(x, mine, norm.tracked(), count, model.norm_eps, offset, fusion)
            return x if rope is None else apply_rope(x, rope, fusion)

        again = context.saved.recomputed
        q = again("rope", partial(made, 0, self.q_norm, model.num_attention_heads))(q, sums)
        return q, again("rope", partial(made, 1, self.k_norm, model.kv_heads))(k, sums)

    def _normalise_and_rotate(self, x: torch.Tensor, norm: ShardedParameter, rope: torch.Tensor | None) -> torch.Tensor:
        """Normalise queries or keys [s, b, heads, d], and rotate them where the model does so."""
        x = self.kernel(x, norm.tracked())
        return x if rope is None else apply_rope(x, rope, self.context.kernels.fusion)
