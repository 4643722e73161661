"""Multi-head latent attention, cut over tp by heads.

    x [s(/t), b, h] --down--> latents, key of rotation [s(/t), b, r_q + r_kv + dr] --norms, rotation--> c_q, [c_kv | key]
    c_q --column--> q [s, b, heads/t, dr + dn]
    [c_kv | key] --enter tp region--> --gather over cp--> [s, b, r_kv + dr]
    c_kv --heads--> k [s, b, heads/t, dr + dn], v [s, b, heads/t, dv] --attention--> [s, b, heads/t * dv] --row--> [s(/t), b, h]

`engine/config/schema/mla.py` has the formulas (2405.04434, section 2.1). c_q and c_kv are the latents, with r_q and r_kv elements.
A query or key head has dr + dn elements, of which dr rotate. A value head has dv. s tokens in each of b rows, h hidden size,
t = tp ranks; s(/t) is s/t with sequence parallelism, else s.

Every tp rank holds the whole down-projection weights. With sequence parallelism, a rank multiplies only its part of the sequence,
and the rank's weight gradients are partial sums. Gathers over tp move r_q + r_kv + dr elements per token. If sequence parallelism
is off, each rank computes all latents, and the gradients are whole.

In generation, the cache holds each token's [c_kv | key] (`models/inference/kv_cache.py`). W_kvb is multiplied into the query and
into attention's result, so cached tokens are never expanded into keys and values.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from triaxis.engine.config.schema.layer_kinds import LayerKind
from triaxis.engine.config.schema.mla import MLAConfig
from triaxis.engine.kernels.masked_attention import Mask
from triaxis.engine.kernels.norms import NormKernel
from triaxis.engine.kernels.rotary import apply_rope
from triaxis.engine.layout.shard_spec import cut
from triaxis.engine.linear.layers import ColumnParallelLinear
from triaxis.engine.tensor_parallel.dropout import DropoutKeys
from triaxis.engine.tensor_parallel.entered import entered, outside_of
from triaxis.engine.tensor_parallel.parameter import ShardedParameter
from triaxis.models.gpt.context import BuildContext, Positions


@dataclass(frozen=True, slots=True)
class LatentKeys:
    """Keys and values for this rank's `num_heads` heads, computed from one latent per token.

    Attributes:
        weight: parameter W_kvb.
        up: linear layer that multiplies by W_kvb.
    """

    mla: MLAConfig
    num_heads: int
    weight: ShardedParameter
    up: ColumnParallelLinear

    def __call__(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute k [b, n, s, dr + dn] and v [b, n, s, dv] from latents [b, 1, s, r_kv + dr]."""
        mla, n = self.mla, self.num_heads
        latent, key = latents.squeeze(1).transpose(0, 1).split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        made = self.up(latent).unflatten(-1, (n, mla.qk_nope_head_dim + mla.v_head_dim))
        nope, v = made.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        k = torch.cat((key.unsqueeze(2).expand(-1, -1, n, -1), nope), dim=-1)
        return k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)


class LatentAttention(nn.Module):
    """Attention whose keys and values are computed from one latent per token."""

    def __init__(self, context: BuildContext, name: str, kind: LayerKind) -> None:
        super().__init__()
        self.context, self.name, self.kind = context, name, kind
        assert context.model.mla is not None
        self.mla = context.model.mla
        outside = outside_of(context.region)
        # If there is no q_a, queries are projected from x as well, so `down` is not the norm output's only reader.
        has_latent = self.mla.q_lora_rank is not None
        form = context.form_behind_norm() if has_latent else context.form
        self.down = ColumnParallelLinear(
            context.optional_parameters(f"{name}.q_a.weight", f"{name}.kv_a.weight"),
            [],
            outside,
            context.queue,
            f"{name}.down",
            form,
        )
        self.norm_kernel = NormKernel(context.model.norm_kind.of_heads, context.model.norm_eps, context.kernels.fusion)
        self.q_norm = context.optional_parameter(f"{name}.q_a_norm.weight")
        self.kv_norm = context.parameter(f"{name}.kv_a_norm.weight")
        query = "q" if self.mla.q_lora_rank is None else "q_b"
        self.q_up = ColumnParallelLinear(
            [context.parameter(f"{name}.{query}.weight")],
            [],
            context.region,
            context.queue,
            f"{name}.q_up",
            context.form.alone("norm") if has_latent else context.form,
        )
        kv_b = context.parameter(f"{name}.kv_b.weight")
        # Decoding multiplies this weight into the queries, so it stays in the run's dtype.
        self.kv_up = ColumnParallelLinear([kv_b], [], outside, context.queue, f"{name}.kv_up")
        first, stop = cut(context.model.num_attention_heads, context.region.axis.size, context.region.axis.index)
        self.num_heads = stop - first
        self.mixer = context.mixer(name, kind, LatentKeys(self.mla, self.num_heads, kv_b, self.kv_up))
        self.proj = context.row(f"{name}.proj")

    def forward(self, x: torch.Tensor, positions: Positions, keys: DropoutKeys) -> torch.Tensor:
        """Compute attention among the tokens of x [s(/t), b, h], and return [s(/t), b, h]."""
        context = self.context
        rope = None if self.kind.rotary is None else positions.tables[self.kind.rotary]
        mask = Mask(self.kind.window, positions.documents, positions.part)
        q_entry, latents = self._latents(x, rope)  # [s(/t), b, r_q or h], [s(/t), b, r_kv + dr]
        q = self.q_up(q_entry).unflatten(-1, (self.num_heads, self.mla.qk_head_dim))  # [s, b, heads/t, dr + dn]
        q = context.saved.recomputed("rope", partial(self._rotate, rope=rope))(q)
        latents = entered(latents, context.region, f"{self.name}.latents").unsqueeze(2)  # [s, b, 1, r_kv + dr]
        mixed = self.mixer(q, (latents,), mask, keys if self.training else None)  # [s, b, heads/t * dv]
        return self.proj(mixed)  # [s(/t), b, h]

    def _latents(self, x: torch.Tensor, rope: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the query projection's input and [c_kv | key] from x [s(/t), b, h].

        The first is c_q [s(/t), b, r_q], or x itself if there is no query latent. The second is [s(/t), b, r_kv + dr].
        """
        mla, region, again = self.mla, self.context.region, self.context.saved.recomputed
        q_size = mla.q_lora_rank or 0
        q, kv, key = self.down(x).split((q_size, mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        q = x if self.q_norm is None else again("norm", partial(self._normalise, norm=self.q_norm))(q)
        # The key is rotated before it enters the region, so it needs the tables for this rank's part of the sequence.
        if rope is not None:
            whole = x.shape[0] * (region.axis.size if region.sequence_parallel else 1)
            rope = rope[:, region.shard_of_sequence(whole)]
        key = self._rotate(key.unsqueeze(2), rope).squeeze(2)
        return q, torch.cat((self._normalise(kv, self.kv_norm), key), dim=-1)

    def _normalise(self, x: torch.Tensor, norm: ShardedParameter) -> torch.Tensor:
        return self.norm_kernel(x, norm.tracked())

    def _rotate(self, x: torch.Tensor, rope: torch.Tensor | None) -> torch.Tensor:
        """Apply RoPE to each head's first dr elements in x [s, b, n, d]. Without RoPE in the layer, return x."""
        return x if rope is None else apply_rope(x, rope, self.context.kernels.fusion)
