"""A GPT with a scaled MLP in plain torch, from whole tensors: RMSNorm, attention without positions, SwiGLU, a tied head."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F


def reference(model: Any, weights: Mapping[str, torch.Tensor], batch: Any) -> torch.Tensor:
    """Return the loss of every label [b, s]."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + model.norm_eps).rsqrt() * weights[name]

    x = weights["embedding.word.weight"][batch.tokens]  # [b, s, h]
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    for layer in range(model.num_layers):
        at = f"layers.{layer}."
        y = norm(x, f"{at}attention.norm.weight")
        q = torch.einsum("bsh,ndh->bnsd", y, weights[f"{at}attention.q.weight"])
        k, v = torch.einsum("bsh,tndh->tbnsd", y, weights[f"{at}attention.kv.weight"])
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~causal, -torch.inf)
        x = x + torch.einsum("bnsd,hnd->bsh", scores.softmax(-1) @ v, weights[f"{at}attention.proj.weight"])
        y = norm(x, f"{at}mlp.norm.weight")
        gate, up = torch.einsum("bsh,tfh->tbsf", y, weights[f"{at}mlp.gate_up.weight"])
        x = x + (F.silu(gate) * up) @ weights[f"{at}mlp.down.weight"].T * weights[f"{at}mlp.scale"]
    logits = norm(x, "final_norm.weight") @ weights["embedding.word.weight"].T
    return F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")


def another(model: Any, weights: Mapping[str, torch.Tensor], batch: Any) -> torch.Tensor:
    """Forget the scale of the last layer."""
    name = f"layers.{model.num_layers - 1}.mlp.scale"
    return reference(model, {**weights, name: torch.ones_like(weights[name])}, batch)
