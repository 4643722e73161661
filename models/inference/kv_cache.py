"""Cache the keys and values of past tokens.

    prompt, p tokens      fills places 0 .. p - 1 of every layer; attention among them is causal
    one token more        fills place p; its query reads places 0 .. p

A rank caches the keys and values that it computes anyway, for its chunks' layers and its key/value heads. Keys are cached after
QK-norm and RoPE. With latent attention, each tp rank caches every token's whole latent and rotated key, which all heads share.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from triaxis.engine.context_parallel.mixer import Mixer, heads_first
from triaxis.engine.kernels.masked_attention import Mask
from triaxis.engine.tensor_parallel.dropout import DropoutKeys
from triaxis.models.gpt.latent_attention import LatentKeys


@dataclass(kw_only=True, eq=False)
class Cached(Mixer):
    """Mixer with a cache, in which new tokens also attend to the text's earlier tokens.

    Attributes:
        places: number of tokens the cache can hold.
        length: number of filled places.
        cache: tensors [1, n_i, places, d_i], with n_i heads of size d_i: keys and values, or latents. Empty before the prompt.
    """

    places: int = 0
    length: int = 0
    cache: list[torch.Tensor] = field(default_factory=list)

    def forget(self, places: int) -> None:
        """Empty the cache and resize it to hold `places` tokens."""
        self.places, self.length, self.cache = places, 0, []

    def __call__(
        self, q: torch.Tensor, rows: Sequence[torch.Tensor], mask: Mask, keys: DropoutKeys | None
    ) -> torch.Tensor:
        """Append new tokens' rows [s, 1, n_i, d_i], and attend to all rows so far.

        Takes q [s, 1, n, d]; returns [s, 1, n * d_v].
        """
        q, *rows = heads_first(q, *rows)
        rows = self.extended(rows)
        if q.shape[2] == 1:
            return self.decode(self.kernels.choices.decoding, mask, q, *rows)
        return self.core((q, *rows), self.kernels.choices.attention, mask, keys, 0)

    def extended(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Append rows [1, n_i, s, d_i], and return views of all rows so far. The views are [1, n_i, length, d_i]."""
        s = rows[0].shape[2]
        assert self.length == 0 or s == 1, (
            "first the prompt, then one token at a time: attention has a mask for these only"
        )
        assert self.length + s <= self.places, f"{self.length} + {s} tokens in a cache of {self.places}"
        if not self.cache:
            self.cache = [each.new_empty(*each.shape[:2], self.places, each.shape[3]) for each in rows]
        for cached, each in zip(self.cache, rows, strict=True):
            cached[:, :, self.length : self.length + s] = each
        self.length += s
        return [cached[:, :, : self.length] for cached in self.cache]

    def decode(self, kernel: str, mask: Mask, *tensors: torch.Tensor) -> torch.Tensor:
        """Attend from one query to all cached keys and values -> [1, 1, n * d_v].

        `tensors` holds the query [1, n, 1, d], then keys and values [1, n_i, length, d_i].
        """
        return self.core(tensors, kernel, mask, None, 0)


@dataclass(kw_only=True, eq=False)
class CachedLatents(Cached):
    """Mixer that caches latents instead of keys and values."""

    made: LatentKeys

    def decode(self, kernel: str, mask: Mask, *tensors: torch.Tensor) -> torch.Tensor:
        """Attend from one query q [1, n, 1, dr + dn] to latents [1, 1, length, r_kv + dr] -> [1, 1, n * dv].

        Keys W_k c and values W_v c are never computed from the cached latents c. For q_n, the part of q that does not rotate, the
        logit q_n . W_k c equals (W_k^T q_n) . c. The weighted sum of W_v c equals W_v times the weighted sum of c.
        """
        (q, latents), mla = tensors, self.made.mla
        of_keys, of_values = self.made.weight.weight().split((mla.qk_nope_head_dim, mla.v_head_dim), dim=1)
        rotated, nope = q.split((mla.qk_rope_head_dim, mla.qk_nope_head_dim), dim=-1)
        q = torch.cat((torch.einsum("bnsd,ndr->bnsr", nope, of_keys), rotated), dim=-1)
        mixed = self.attend(kernel, mask, None, 0, q, latents, latents[..., : mla.kv_lora_rank])
        mixed = mixed.unflatten(-1, (self.made.num_heads, mla.kv_lora_rank))
        return torch.einsum("sbnr,nvr->sbnv", mixed, of_values).flatten(2)
