"""Causal self-attention, cut over tp by heads.

    x [s(/t), b, h] --column--> q [s, b, heads/t, d], k and v [s, b, kv_heads/t, d] --attention--> [s, b, heads/t * d]
      --row--> [s(/t), b, h]

With fewer key/value heads than tp ranks each rank holds one whole head, as a replica. While text is generated, k and v of
earlier tokens come from a cache (`models/gpt/kv_cache.py`). Windows, sinks and rotation are those of the layer's kind.
"""

import torch
from torch import nn

from engine.activations.saved_tensors import ATTENTION
from engine.config.attention_kinds import LayerKind
from engine.data.documents import Documents
from engine.kernels.attention import attention
from engine.kernels.elementwise import apply_rope, rms_norm
from engine.layout.shard_spec import cut
from engine.numerics.precision import accumulate
from engine.tensor_parallel.dropout import DropoutKeys, dropout
from engine.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from engine.tensor_parallel.parameter import ShardedParameter
from models.gpt.context import BuildContext, Positions
from models.gpt.kv_cache import LayerCache


class Attention(nn.Module):
    def __init__(self, context: BuildContext, name: str, kind: LayerKind) -> None:
        super().__init__()
        self.kind = kind
        model, tp = context.model, context.region.axis
        self.context = context
        self.name = name
        self.head_dim = model.head_size
        self.first_head, stop = cut(model.num_attention_heads, tp.size, tp.index)
        self.num_heads = stop - self.first_head
        first_kv, stop_kv = cut(model.kv_heads, tp.size, tp.index)
        self.num_kv_heads = stop_kv - first_kv
        self.qkv = ColumnParallelLinear(
            [context.parameter(f"{name}.q.weight"), context.parameter(f"{name}.kv.weight")],
            context.optional_parameters(f"{name}.q.bias", f"{name}.kv.bias"),
            context.region,
            context.queue,
            f"{name}.qkv",
        )
        self.q_norm = context.optional_parameter(f"{name}.q_norm.weight")
        self.k_norm = context.optional_parameter(f"{name}.k_norm.weight")
        self.sinks = context.optional_parameter(f"{name}.sinks")
        self.proj = RowParallelLinear(
            context.parameter(f"{name}.proj.weight"),
            context.optional_parameter(f"{name}.proj.bias"),
            context.region,
            context.queue,
            f"{name}.proj",
        )

    def forward(
        self, x: torch.Tensor, positions: Positions, keys: DropoutKeys, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """Attend within x [s(/t), b, h] -> [s(/t), b, h]. With a cache, x are its next s tokens."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, k, v = self.qkv(x).split((q_size, kv_size, kv_size), dim=-1)
        s, b = q.shape[:2]
        q = q.view(s, b, self.num_heads, self.head_dim)
        k, v = (tensor.view(s, b, self.num_kv_heads, self.head_dim) for tensor in (k, v))
        saved = self.context.saved
        rope = None if self.kind.rotary is None else positions.tables[self.kind.rotary]
        q = saved.recompute_output("rope", lambda q: self._normalise_and_rotate(q, self.q_norm, rope), q)
        k = saved.recompute_output("rope", lambda k: self._normalise_and_rotate(k, self.k_norm, rope), k)
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (q, k, v))
        if cache is not None:
            k, v = cache.extend(k, v)

        choices = self.context.kernels.choices
        kernel = choices.decoding if cache is not None and s == 1 else choices.attention

        def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self._core(kernel, q, k, v, positions.documents, keys)

        return self.proj(saved.recompute_inside(ATTENTION, core, q, k, v))

    def _normalise_and_rotate(
        self, x: torch.Tensor, norm: ShardedParameter | None, rope: torch.Tensor | None
    ) -> torch.Tensor:
        """Normalise and rotate queries or keys [s, b, heads, d]; x itself where the model has neither."""
        fusion = self.context.kernels.fusion
        if norm is not None:
            x = rms_norm(x, norm.tracked(), self.context.model.norm_eps, fusion)
        return x if rope is None else apply_rope(x, rope, fusion)

    def _core(
        self,
        kernel: str,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: Documents | None,
        keys: DropoutKeys,
    ) -> torch.Tensor:
        """Compute scaled dot-product attention: q [b, n, s, d], k, v [b, n_kv, s_k, d] -> [s, b, n * d].

        s_k = s, causal; or s = 1, with the query at the last of the s_k positions.
        """
        model, sinks = self.context.model, None if self.sinks is None else self.sinks.tracked()
        if kernel == "explicit":
            mixed = self._explicit(q, k, v, documents, sinks, keys)
        else:
            mixed = attention(
                kernel,
                q,
                k,
                v,
                # A single query sees every key, and torch's causal mask would hide all but the first from it.
                is_causal=q.shape[2] > 1,
                scale=model.attention_scale,
                window=self.kind.window,
                documents=documents,
                softcap=model.attention_softcap,
                sinks=sinks,
            )
        return mixed.permute(2, 0, 1, 3).flatten(2)

    def _explicit(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: Documents | None,
        sinks: torch.Tensor | None,
        keys: DropoutKeys,
    ) -> torch.Tensor:
        """Compute attention with its probabilities [b, n, s, s_k] materialised, as dropout on them requires."""
        model = self.context.model
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scale = self.head_dim**-0.5 if model.attention_scale is None else model.attention_scale
        scores = accumulate(q @ k.transpose(-1, -2)) * scale
        if model.attention_softcap is not None:
            scores = (scores / model.attention_softcap).tanh() * model.attention_softcap
        scores = scores.masked_fill(self._hidden_keys(q.shape[2], k.shape[2], documents, q.device), -torch.inf)
        if sinks is None:
            probabilities = scores.softmax(-1).to(q.dtype)
        else:
            sink = accumulate(sinks).view(-1, 1, 1).expand(*scores.shape[:3], 1)
            probabilities = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1].to(q.dtype)
        p, s = model.attention_dropout, q.shape[2]
        if p and self.training:
            head, row, column = (torch.arange(n, device=q.device) for n in (q.shape[1], s, s))
            positions = ((self.first_head + head).view(-1, 1, 1) * s + row.view(-1, 1)) * s + column
            fusion, site = self.context.kernels.fusion, f"{self.name}.dropout"
            probabilities = dropout(probabilities, p, keys, site, positions.unsqueeze(0), batch_dim=0, fusion=fusion)
        return probabilities @ v

    def _hidden_keys(self, s: int, s_k: int, documents: Documents | None, device: torch.device) -> torch.Tensor:
        """Return which of s_k keys each of the last s queries does not see: bool [s, s_k], with documents [b, 1, s, s_k]."""
        hidden = torch.ones(s, s_k, dtype=torch.bool, device=device).triu(1 + s_k - s)
        if self.kind.window is not None and self.kind.window < s_k:
            # In place: [s, s] is large.
            hidden |= torch.ones(s, s_k, dtype=torch.bool, device=device).tril(s_k - s - self.kind.window)
        if documents is None or documents.is_one_per_row:
            return hidden
        numbers = documents.numbers.unsqueeze(1)
        return hidden | (numbers.unsqueeze(-1) != numbers.unsqueeze(-2))
