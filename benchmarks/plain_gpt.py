"""The yardstick: a GPT and its training loop as one would write them by hand for a single process, in plain PyTorch.

    tokens [b, s] -> embedding (+ positions) -> blocks [b, s, h] -> norm -> head [b, s, V] -> cross-entropy

`nn.Linear`, `F.scaled_dot_product_attention`, `F.cross_entropy`, ordinary autograd, `torch.optim.AdamW(fused=True)`; nothing of
the engine's layers, buffers or schedules. The arithmetic is the engine's: same shapes, same weights (`load`), gradients
accumulated in the accumulation dtype over microbatches, clipping by the global norm, master weights for bf16.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.schema.training import OptimizerConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.numerics.precision import DTYPES, accumulation_dtype

POINTWISE: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
"""By the function of an activation (`triaxis.engine.config.values.model_choices.Activation.pointwise`)."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of q [b, heads, s, d] to k, v [b, kv_heads, s, d]."""


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend within whole samples."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class PlainBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), on [b, s, h]."""

    def __init__(self, model: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        h, self.heads, self.kv_heads, self.d = (
            model.hidden_size,
            model.num_attention_heads,
            model.kv_heads,
            model.head_size,
        )
        self.is_gated = model.activation_kind.is_gated
        self.pointwise = POINTWISE[model.activation_kind.pointwise]
        self.attention_norm, self.mlp_norm = plain_norm(model), plain_norm(model)
        qkv_bias, bias = model.bias != "none", model.bias == "all"
        self.qkv = nn.Linear(h, (self.heads + 2 * self.kv_heads) * self.d, bias=qkv_bias)
        self.proj = nn.Linear(self.heads * self.d, h, bias=bias)
        self.up = nn.Linear(h, model.ffn_size * model.activation_kind.num_inputs, bias=bias)
        self.down = nn.Linear(model.ffn_size, h, bias=bias)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        b, s, _ = x.shape
        sizes = [heads * self.d for heads in (self.heads, self.kv_heads, self.kv_heads)]
        parts = self.qkv(self.attention_norm(x)).split(sizes, dim=-1)
        q, k, v = (part.view(b, s, -1, self.d).transpose(1, 2) for part in parts)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        mixed = self.attend(q, k, v)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, s, -1))
        y = self.up(self.mlp_norm(x))
        if self.is_gated:
            gate, up = y.chunk(2, dim=-1)
            y = self.pointwise(gate) * up
        else:
            y = self.pointwise(y)
        return x + self.down(y)


class PlainGPT(nn.Module):
    """A GPT with LayerNorm or RMSNorm, GELU or SwiGLU, learned positions or RoPE, tied or untied head."""

    def __init__(self, model: ModelConfig, attend: Attend = causal) -> None:
        super().__init__()
        h, vocabulary = model.hidden_size, model.padded_vocab_size
        assert vocabulary == model.vocab_size, "the plain loop knows no padding: choose a vocabulary that needs none"
        self.model = model
        self.word = nn.Embedding(vocabulary, h)
        self.position = nn.Embedding(model.seq_length, h) if model.position == "learned" else None
        self.blocks = nn.ModuleList([PlainBlock(model, attend) for _ in range(model.num_layers)])
        self.final_norm = plain_norm(model)
        self.head = nn.Linear(h, vocabulary, bias=False)
        if model.tie_embeddings:
            self.head.weight = self.word.weight

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [b, s] -> logits [b, s, V]."""
        x = self.word(tokens)
        rope = None
        if self.position is not None:
            x = x + self.position(position_ids)
        else:
            rope = rotation(position_ids, self.model, x.dtype)
        for block in self.blocks:
            x = block(x, rope)
        return self.head(self.final_norm(x))


def plain_norm(model: ModelConfig) -> nn.Module:
    kind = nn.LayerNorm if model.norm == "layernorm" else nn.RMSNorm
    return kind(model.hidden_size, eps=model.norm_eps)


def rotation(position_ids: torch.Tensor, model: ModelConfig, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [b, 1, s, d] for `rotate`, in the accumulation dtype."""
    d, wide = model.head_size, accumulation_dtype(dtype)
    frequencies = model.rope_base ** (-torch.arange(0, d, 2, dtype=wide, device=position_ids.device) / d)
    angles = (position_ids.to(wide).unsqueeze(-1) * frequencies).repeat(1, 1, 2).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """RoPE on [b, heads, s, d], pairing dim i with i + d/2."""
    first, second = x.chunk(2, dim=-1)
    return (x * cosines + torch.cat((-second, first), dim=-1) * sines).to(x.dtype)


def adamw(parameters: Iterable[torch.Tensor], options: OptimizerConfig) -> torch.optim.AdamW:
    """Build torch's fused AdamW; what is no matrix does not decay."""
    matrices, vectors = [], []
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else vectors).append(parameter)
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        fused=True,
    )


class Weights:
    """Parameters, their masters in the accumulation dtype, and AdamW on these.

    Where the parameters' dtype is its own accumulation dtype, a parameter is its own master and `.grad` the main grad.
    """

    def __init__(self, module: nn.Module, options: OptimizerConfig) -> None:
        self.options = options
        self.parameters: list[torch.Tensor] = list(module.parameters())
        wide = accumulation_dtype(self.parameters[0].dtype)
        self.has_masters = wide != self.parameters[0].dtype
        self.masters = [p.detach().to(wide).requires_grad_() if self.has_masters else p for p in self.parameters]
        if self.has_masters:
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.register_post_accumulate_grad_hook(adds_to(master))
        self.optimizer = adamw(self.masters, options)

    def update(self, lr: float) -> torch.Tensor:
        """Clip, update and forget the gradients; return their norm before clipping, which is not waited for."""
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.options.clip_grad or torch.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.has_masters:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)
        return norm


class PlainLoop:
    """One process, one step at a time; `step` returns (loss per token, gradient norm before clipping)."""

    def __init__(self, config: Config, weights: Mapping[str, torch.Tensor], attend: Attend = causal) -> None:
        self.config = config
        self.model = PlainGPT(config.model, attend).to(DTYPES[config.precision.dtype])
        load(self.model, weights)
        self.weights = Weights(self.model, config.optimizer)

    def step(self, microbatches: Sequence[Any], lr: float) -> tuple[float, float]:
        """One optimizer step over microbatches (`triaxis.engine.data.loader.MicroBatch`) in which every token counts."""
        loss = self.forward_backward(microbatches)
        return loss, self.update(lr)

    def forward_backward(self, microbatches: Sequence[Any]) -> float:
        """Adds the gradients of all microbatches; returns the loss per token."""
        num_tokens = sum(microbatch.tokens.numel() for microbatch in microbatches)
        loss_sum = torch.zeros((), dtype=self.weights.masters[0].dtype)
        for microbatch in microbatches:
            logits = self.model(microbatch.tokens, microbatch.position_ids).flatten(0, 1)
            loss = F.cross_entropy(logits.to(loss_sum.dtype), microbatch.labels.flatten(), reduction="sum")
            loss_sum += loss.detach()
            (loss / num_tokens).backward()
        return float(loss_sum) / num_tokens

    def update(self, lr: float) -> float:
        """Clips, updates and forgets the gradients; returns their norm before clipping."""
        return float(self.weights.update(lr))


def adds_to(master: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """A hook that moves a parameter's gradient, in the run's dtype, to its master's as soon as it is there."""

    def add(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return add


@torch.no_grad()
def load(plain: PlainGPT, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy weights by their names in `models/specs.py` into the plain model."""
    tensors = {
        "word.weight": weights["embedding.word.weight"],
        "head.weight": weights.get("head.weight", weights["embedding.word.weight"]),
        "final_norm.weight": weights["final_norm.weight"],
    }
    if plain.position is not None:
        tensors["position.weight"] = weights["embedding.position.weight"]
    for layer in range(plain.model.num_layers):
        for ours, theirs in (
            ("attention.norm", "attention_norm"),
            ("attention.proj", "proj"),
            ("mlp.norm", "mlp_norm"),
            ("mlp.gate_up" if plain.model.activation_kind.is_gated else "mlp.up", "up"),
            ("mlp.down", "down"),
        ):
            for kind in ("weight", "bias"):
                if f"layers.{layer}.{ours}.{kind}" in weights:
                    tensors[f"blocks.{layer}.{theirs}.{kind}"] = weights[f"layers.{layer}.{ours}.{kind}"]
        for kind in ("weight", "bias"):
            parts = [weights.get(f"layers.{layer}.attention.{part}.{kind}") for part in ("q", "kv")]
            held = [part.reshape(-1, *part.shape[-1:] * (kind == "weight")) for part in parts if part is not None]
            if held:
                tensors[f"blocks.{layer}.qkv.{kind}"] = torch.cat(held)
    if "final_norm.bias" in weights:
        tensors["final_norm.bias"] = weights["final_norm.bias"]
    for name, parameter in plain.state_dict().items():
        parameter.copy_(tensors[name].reshape(parameter.shape))
