"""Multi-head latent attention (2405.04434, section 2.1; `engine/config/mla.py` has the formulas), cut over tp by heads.

    x [s(/t), b, h] --down--> latents, key of rotation [s(/t), b, r_q + r_kv + dr] --norms, rotation--> c_q, [c_kv | key]
    c_q --column--> q [s, b, heads/t, dr + dn]      [c_kv | key] --f over tp--> --gather over cp--> [s, b, r_kv + dr]
    c_kv --heads--> k [s, b, heads/t, dr + dn], v [s, b, heads/t, dv] --attention--> [s, b, heads/t * dv] --row--> [s(/t), b, h]

The weights down to latents are whole on every tp rank and act on its part of the sequence; then the latents enter the region.
With sequence parallelism so w b s (r_q + r_kv + dr) bytes are gathered in place of w b s h, no product is computed twice, and these
weights' gradients are partial over the sequence, as norms' are. Without it each rank computes all of them, and gradients are whole.

Where text is generated, the cache holds [c_kv | key] of a token. One query then goes to the latents themselves: the keys' half of
W_kvb is multiplied into it, the values' half into what it gathers, so the cached tokens are never made into keys and values.
"""

from functools import partial

import torch

from triaxis.engine.activations.saved_tensors import ATTENTION
from triaxis.engine.config.attention_kinds import LayerKind
from triaxis.engine.kernels.elementwise import norm as norm_by_name
from triaxis.engine.kernels.masked_attention import Mask
from triaxis.engine.kernels.rotary import apply_rope
from triaxis.engine.tensor_parallel.dropout import DropoutKeys
from triaxis.engine.tensor_parallel.entered import entered, outside_of
from triaxis.engine.tensor_parallel.layers import ColumnParallelLinear
from triaxis.engine.tensor_parallel.parameter import ShardedParameter
from triaxis.models.gpt.attention_core import AttentionCore
from triaxis.models.gpt.context import BuildContext, Positions
from triaxis.models.gpt.kv_cache import LatentCache


class LatentAttention(AttentionCore):
    """Attention whose keys and values are made from one latent per token."""

    def __init__(self, context: BuildContext, name: str, kind: LayerKind) -> None:
        super().__init__(context, name, kind)
        assert context.model.mla is not None
        self.mla = context.model.mla
        outside = outside_of(context.region)
        # Queries that are made from x share it with what is made down to latents.
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
        self.kv_b = context.parameter(f"{name}.kv_b.weight")
        # Decoding multiplies this weight into the queries, so it stays in the run's dtype.
        self.kv_up = ColumnParallelLinear([self.kv_b], [], outside, context.queue, f"{name}.kv_up")

    def new_cache(self, places: int, device: torch.device) -> LatentCache:
        """Build an empty cache for one sequence of at most `places` tokens."""
        return LatentCache((places, 1, self.mla.cached_size), self.context.dtype, device)

    def forward(
        self, x: torch.Tensor, positions: Positions, keys: DropoutKeys, cache: LatentCache | None = None
    ) -> torch.Tensor:
        """Attend within x [s(/t), b, h] -> [s(/t), b, h]. With a cache, x are its next s tokens."""
        context, choices = self.context, self.context.kernels.choices
        rope = None if self.kind.rotary is None else positions.tables[self.kind.rotary]
        q_entry, latents = self._latents(x, rope)
        q = self.q_up(q_entry).unflatten(-1, (self.num_heads, self.mla.qk_head_dim))
        q = context.saved.recompute_output("rope", partial(self._rotate, rope=rope), q).permute(1, 2, 0, 3)
        latents = entered(latents, context.region, f"{self.name}.latents")
        if positions.part is not None:
            latents = context.cp.gathered_rows(latents, positions.part)
        mask = Mask(self.kind.window, positions.documents, positions.part)
        if cache is not None:
            latents = cache.extend(latents)
            if q.shape[2] == 1:
                return self.proj(self._decode(choices.decoding, mask, keys, q, latents))
        attend = partial(self._attend, choices.attention, mask, keys)
        return self.proj(context.saved.recompute_inside(ATTENTION, attend, q, latents))

    def _latents(self, x: torch.Tensor, rope: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input of the queries' projection, and [c_kv | key] [s(/t), b, r_kv + dr], from x [s(/t), b, h]."""
        mla, region, again = self.mla, self.context.region, self.context.saved.recompute_output
        q_size = mla.q_lora_rank or 0
        q, kv, key = self.down(x).split((q_size, mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        q = x if self.q_norm is None else again("norm", partial(self._normalise, norm=self.q_norm), q)
        if rope is not None:
            whole = x.shape[0] * (region.axis.size if region.sequence_parallel else 1)
            rope = rope[:, region.shard_of_sequence(whole)]
        key = self._rotate(key.unsqueeze(2), rope).squeeze(2)
        return q, torch.cat((self._normalise(kv, self.kv_norm), key), dim=-1)

    def _normalise(self, x: torch.Tensor, norm: ShardedParameter) -> torch.Tensor:
        model = self.context.model
        return norm_by_name(model.norm_kind.of_heads, x, [norm.tracked()], model.norm_eps, self.context.kernels.fusion)

    def _rotate(self, x: torch.Tensor, rope: torch.Tensor | None) -> torch.Tensor:
        """Rotate the first dr elements of x [s, b, n, d]; x itself where the layer rotates nothing."""
        return x if rope is None else apply_rope(x, rope, self.context.kernels.fusion)

    def _attend(
        self, kernel: str, mask: Mask, keys: DropoutKeys, q: torch.Tensor, latents: torch.Tensor
    ) -> torch.Tensor:
        """Make keys and values from latents [s_k, b, r_kv + dr], and attend from q [b, n, s, dr + dn] -> [s, b, n * dv]."""
        mla, n = self.mla, self.num_heads
        latent, key = latents.split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        made = self.kv_up(latent).unflatten(-1, (n, mla.qk_nope_head_dim + mla.v_head_dim))
        nope, v = made.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        k = torch.cat((key.unsqueeze(2).expand(-1, -1, n, -1), nope), dim=-1)
        k, v = (each.permute(1, 2, 0, 3) for each in (k, v))
        return self._core(kernel, mask, keys, slice(0, n), q, k, v)

    def _decode(
        self, kernel: str, mask: Mask, keys: DropoutKeys, q: torch.Tensor, latents: torch.Tensor
    ) -> torch.Tensor:
        """Attend from one query q [b, n, 1, dr + dn] to latents [s_k, b, r_kv + dr] -> [1, b, n * dv].

        The logit q_n . W_k c is (W_k^T q_n) . c, and the weighted sum of W_v c is W_v times that of c.
        """
        mla = self.mla
        of_keys, of_values = self.kv_b.weight().split((mla.qk_nope_head_dim, mla.v_head_dim), dim=1)
        rotated, nope = q.split((mla.qk_rope_head_dim, mla.qk_nope_head_dim), dim=-1)
        q = torch.cat((torch.einsum("bnsd,ndr->bnsr", nope, of_keys), rotated), dim=-1)
        k = latents.permute(1, 0, 2).unsqueeze(1)
        mixed = self._core(kernel, mask, keys, slice(0, self.num_heads), q, k, k[..., : mla.kv_lora_rank])
        mixed = mixed.unflatten(-1, (self.num_heads, mla.kv_lora_rank))
        return torch.einsum("sbnr,nvr->sbnv", mixed, of_values).flatten(2)
