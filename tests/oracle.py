"""The oracle: a GPT in plain PyTorch, one process, ordinary autograd, nothing of the engine's layers.

Weights are a dict of float64 tensors with the logical shapes and names of `models/specs.py`. It is slow and simple on
purpose. Only the dropout masks come from the engine (they are defined as a function of element positions; how a layout
slices them is what the tests check).
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from engine.config.model import ModelConfig
from engine.tensor_parallel.dropout import DropoutKeys, dropout

Weights = Mapping[str, torch.Tensor]


def oracle_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Weights off the initial point: norm gains around 1, biases and all else around 0, nothing exactly zero or one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        is_gain = "norm" in name and name.endswith("weight")
        weights[name] = (1.0 + 0.2 * noise if is_gain else 0.15 * noise).requires_grad_()
    return weights


def oracle_loss_sum(
    model: ModelConfig,
    weights: Weights,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor,
    sample_ids: list[int],
    seed: int = 0,
) -> torch.Tensor:
    """Sum of the unmasked tokens' losses. ids int64 [b, s], mask bool [b, s]."""
    b, s = tokens.shape
    h, d = model.hidden_size, model.head_size
    heads, kv_heads = model.num_attention_heads, model.kv_heads
    keys = DropoutKeys(seed, sample_ids)

    def hidden_dropout(x: torch.Tensor, site: str) -> torch.Tensor:
        positions = (torch.arange(s).view(1, s, 1) * h + torch.arange(h)).expand(1, s, h)
        return dropout(x, model.hidden_dropout, keys, site, positions, batch_dim=0)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        gain = weights[f"{name}.weight"]
        if model.norm == "layernorm":
            return F.layer_norm(x, (h,), gain, weights[f"{name}.bias"], model.norm_eps)
        return x / (x.pow(2).mean(-1, keepdim=True) + model.norm_eps).sqrt() * gain

    def head_norm(x: torch.Tensor, name: str) -> torch.Tensor:
        if name not in weights:
            return x
        return x / (x.pow(2).mean(-1, keepdim=True) + model.norm_eps).sqrt() * weights[name]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        """x [b, n, s, d] by complex multiplication, pairing dim i with dim i + d/2."""
        if model.position != "rope":
            return x
        frequencies = model.rope_base ** (-torch.arange(d // 2, dtype=torch.float64) * 2 / d)
        angles = position_ids.unsqueeze(-1) * frequencies
        turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        pairs = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turn
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: int) -> torch.Tensor:
        return F.linear(x, weight.reshape(out, -1), None if bias is None else bias.reshape(-1))

    x = F.embedding(tokens, weights["embedding.word.weight"])
    if model.position == "learned":
        x = x + weights["embedding.position.weight"][position_ids]
    x = hidden_dropout(x, "embedding.dropout")

    causal = torch.ones(s, s, dtype=torch.bool).tril()
    for layer in range(model.num_layers):
        name = f"layers.{layer}.attention"
        y = norm(x, f"{name}.norm")
        q = linear(y, weights[f"{name}.q.weight"], weights.get(f"{name}.q.bias"), heads * d)
        kv = linear(y, weights[f"{name}.kv.weight"], weights.get(f"{name}.kv.bias"), 2 * kv_heads * d)
        q = q.view(b, s, heads, d).transpose(1, 2)
        k, v = kv.view(b, s, 2, kv_heads, d).permute(2, 0, 3, 1, 4)
        q = rotate(head_norm(q, f"{name}.q_norm.weight"))
        k = rotate(head_norm(k, f"{name}.k_norm.weight"))
        group = heads // kv_heads
        k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(d)).masked_fill(~causal, -math.inf)
        probabilities = scores.softmax(-1)
        n, row, column = torch.arange(heads), torch.arange(s), torch.arange(s)
        where = ((n.view(-1, 1, 1) * s + row.view(-1, 1)) * s + column).unsqueeze(0)
        probabilities = dropout(probabilities, model.attention_dropout, keys, f"{name}.dropout", where, batch_dim=0)
        mixed = (probabilities @ v).transpose(1, 2).reshape(b, s, heads * d)
        branch = linear(mixed, weights[f"{name}.proj.weight"], weights.get(f"{name}.proj.bias"), h)
        x = x + hidden_dropout(branch, f"{name}.residual_dropout")

        name = f"layers.{layer}.mlp"
        y = norm(x, f"{name}.norm")
        f = model.ffn_size
        if model.activation in ("swiglu", "geglu_tanh"):
            bias = weights.get(f"{name}.gate_up.bias")
            gate, up = linear(y, weights[f"{name}.gate_up.weight"], bias, 2 * f).split(f, dim=-1)
            is_silu = model.activation == "swiglu"
            y = (gate * torch.sigmoid(gate) if is_silu else F.gelu(gate, approximate="tanh")) * up
        else:
            y = linear(y, weights[f"{name}.up.weight"], weights.get(f"{name}.up.bias"), f)
            y = F.gelu(y, approximate="tanh" if model.activation == "gelu_tanh" else "none")
        branch = linear(y, weights[f"{name}.down.weight"], weights.get(f"{name}.down.bias"), h)
        x = x + hidden_dropout(branch, f"{name}.residual_dropout")

    head = weights["embedding.word.weight" if model.tie_embeddings else "head.weight"]
    logits = norm(x, "final_norm") @ head.t()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(b, s)
    return (losses * loss_mask).sum()
