"""Queries and keys as attention reads them: normalised where the model has QK-norm, and rotated where the layer rotates."""

from functools import partial

import torch
from torch import nn

from triaxis.engine.kernels.elementwise import norm as norm_by_name
from triaxis.engine.kernels.rotary import apply_rope
from triaxis.engine.tensor_parallel.parameter import ShardedParameter
from triaxis.engine.tensor_parallel.qk_norm import normalised, squares
from triaxis.models.gpt.context import BuildContext


class NormalisedAndRotated(nn.Module):
    """Norms and rotation of queries and keys.

    Attributes:
        is_rotation: it normalises nothing and makes nothing again, so the split of queries, keys and values rotates them itself.
    """

    def __init__(self, context: BuildContext, name: str) -> None:
        super().__init__()
        self.context = context
        self.q_norm = context.optional_parameter(f"{name}.q_norm.weight")
        self.k_norm = context.optional_parameter(f"{name}.k_norm.weight")
        self.is_rotation = not context.model.qk_norm and "rope" not in context.saved.parts

    def forward(self, q: torch.Tensor, k: torch.Tensor, rope: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise and rotate q [s, b, heads, d] and k [s, b, kv_heads, d]; themselves where the model does neither."""
        over_all = self.context.model.qk_norm == "all_heads"
        return self._all(q, k, rope) if over_all else self._each(q, k, rope)

    def _each(self, q: torch.Tensor, k: torch.Tensor, rope: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise each head where the model has QK-norm, and rotate."""
        again = self.context.saved.recompute_output
        q = again("rope", lambda q: self._normalise_and_rotate(q, self.q_norm, rope), q)
        return q, again("rope", lambda k: self._normalise_and_rotate(k, self.k_norm, rope), k)

    def _all(self, q: torch.Tensor, k: torch.Tensor, rope: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise over all heads of a token, and rotate. What communicates is no part of what is made again."""
        context, model = self.context, self.context.model
        replicas = max(1, context.region.axis.size // model.kv_heads)
        sums = squares(q, k, context.region.axis, replicas, context.kernels.fusion)

        def made(which: int, norm: ShardedParameter, heads: int, x: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
            mine, count = sums[..., which : which + 1], heads * model.head_size
            fusion, offset = context.kernels.fusion, model.norm_kind.offset
            x = normalised(x, mine, norm.tracked(), count, model.norm_eps, offset, fusion)
            return x if rope is None else apply_rope(x, rope, fusion)

        assert self.q_norm is not None and self.k_norm is not None
        again = context.saved.recompute_output
        q = again("rope", partial(made, 0, self.q_norm, model.num_attention_heads), q, sums)
        return q, again("rope", partial(made, 1, self.k_norm, model.kv_heads), k, sums)

    def _normalise_and_rotate(
        self, x: torch.Tensor, norm: ShardedParameter | None, rope: torch.Tensor | None
    ) -> torch.Tensor:
        """Normalise and rotate queries or keys [s, b, heads, d]; x itself where the model has neither."""
        fusion = self.context.kernels.fusion
        if norm is not None:
            model = self.context.model
            x = norm_by_name(model.norm_kind.of_heads, x, [norm.tracked()], model.norm_eps, fusion)
        return x if rope is None else apply_rope(x, rope, fusion)
