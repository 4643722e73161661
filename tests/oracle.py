"""The oracle: a GPT in plain PyTorch, one process, ordinary autograd, nothing of the engine's layers.

Weights are a dict of float64 tensors with the logical shapes and names of `models/specs.py`. It is slow and simple on
purpose. Only the dropout masks come from the engine (they are defined as a function of element positions; how a layout
slices them is what the tests check).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from triaxis.engine.config.schema.layer_kinds import RopeScaling
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.schema.moe import MoEConfig
from triaxis.engine.tensor_parallel.dropout import DropoutKeys, DropoutSites, dropout

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


def fields_of_layer(model: ModelConfig, layer: int) -> Mapping[str, Any]:
    """The attention's fields of one layer: the model's own, and what its kind changes."""
    names = [
        name
        for entry in model.layers or []
        for name, _, times in [entry.partition("*")]
        for _ in range(int(times or 1))
    ]
    own = {
        name: getattr(model, name)
        for name in ("window", "position", "rope_base", "rope_scaling", "rotary_share", "sinks")
    }
    # A layer of multi-token prediction is of the last one's kind.
    name = names[min(layer, model.num_layers - 1) % len(names)] if names else ""
    of_kind: Mapping[str, Any] = {"mlp": "moe"} if name == "moe" else model.layer_kinds.get(name, {})
    return {"mlp": "dense"} | own | dict(of_kind)


def rope_frequencies(r: int, base: float, scaling: RopeScaling | None, length: int) -> tuple[torch.Tensor, float]:
    """The angle per position of each pair of r elements, and the length that a rotated pair gets, for samples of `length`.

    Pair by pair, from the papers: position interpolation (2306.15595), Llama 3.1's rule, YaRN (2309.00071), LongRoPE (2402.13753).
    """
    plain = [base ** (-2 * i / r) for i in range(r // 2)]
    if scaling is None:
        return torch.tensor(plain, dtype=torch.float64), 1.0
    factor, old = scaling.factor or 1.0, scaling.original_max_position_embeddings or 1
    found, stretch = [], 1.0
    for i, frequency in enumerate(plain):
        waves = old * frequency / (2 * math.pi)
        if scaling.type == "linear":
            share = 0.0
        elif scaling.type == "llama3":
            low, high = scaling.low_freq_factor or 0.0, scaling.high_freq_factor or 0.0
            share = 1.0 if waves > high else 0.0 if waves < low else (waves - low) / (high - low)
        elif scaling.type == "yarn":
            first, last = (
                r * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(base))
                for turns in (scaling.beta_fast or 32, scaling.beta_slow or 1)
            )
            first, last = max(math.floor(first), 0), min(math.ceil(last), r - 1)
            share = 1 - min(max((i - first) / ((last - first) or 0.001), 0.0), 1.0)
        else:
            factors = scaling.long_factor if length > old else scaling.short_factor
            assert factors is not None
            found.append(frequency / factors[i])
            continue
        found.append(share * frequency + (1 - share) * frequency / factor)
    if scaling.type == "yarn":
        top, bottom = (
            1 + 0.1 * (1.0 if each is None else each) * math.log(factor)
            for each in (scaling.mscale, scaling.mscale_all_dim)
        )
        stretch = top if scaling.mscale_all_dim is None else top / bottom
    if scaling.type == "longrope":
        stretch = math.sqrt(1 + math.log(factor) / math.log(old))
    return torch.tensor(found, dtype=torch.float64), scaling.attention_factor or stretch


def oracle_loss_sum(
    model: ModelConfig, weights: Weights, tokens: torch.Tensor, *rows: Any, **options: Any
) -> torch.Tensor:
    """Sum of the unmasked tokens' losses; arguments as of `oracle_losses`."""
    return oracle_losses(model, weights, tokens, *rows, **options).of_next


class OracleLosses(NamedTuple):
    """The losses of some samples, each a scalar of its own graph.

    Attributes:
        of_next: sum over the counted labels, with the z-loss of the head in its gradient and not in its value.
        ahead: the same of each token ahead, without a weight, and the number of its counted labels.
        on_load: the losses of the routers, as a sum over all tokens.
    """

    of_next: torch.Tensor
    ahead: list[tuple[torch.Tensor, int]]
    on_load: torch.Tensor


def oracle_losses(
    model: ModelConfig,
    weights: Weights,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor,
    sample_ids: list[int],
    seed: int = 0,
    documents: torch.Tensor | None = None,
    load: dict[int, torch.Tensor] | None = None,
) -> OracleLosses:
    """Losses of samples. ids int64 [b, s], mask bool [b, s]; documents: number of each token's, [b, s].

    `load` gets the tokens that chose each expert, [E] by layer.
    """
    b, s = tokens.shape
    h, d, mla = model.hidden_size, model.head_size, model.mla
    heads, kv_heads = model.num_attention_heads, model.kv_heads
    keys = DropoutKeys(DropoutSites(seed), sample_ids, torch.tensor(sample_ids))

    first_gain = 1.0 if model.norm == "rmsnorm_1p" else 0.0

    def hidden_dropout(x: torch.Tensor, site: str) -> torch.Tensor:
        positions = (torch.arange(s).view(1, s, 1) * h + torch.arange(h)).expand(1, s, h)
        return dropout(x, model.hidden_dropout, keys, site, positions, batch_dim=0)

    def latent_norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + model.norm_eps).sqrt() * (weights[name] + first_gain)

    def through_latents(x: torch.Tensor, name: str, kind: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """q, k [b, n, s, dr + dn] and v [b, n, s, dv] of latent attention (2405.04434, equations 9 to 17), from x [b, s, h]."""
        rank, rope_size = mla.kv_lora_rank, mla.qk_rope_head_dim
        if mla.q_lora_rank is None:
            q = torch.einsum("bsh,ndh->bnsd", x, weights[f"{name}.q.weight"])
        else:
            latent = latent_norm(x @ weights[f"{name}.q_a.weight"].t(), f"{name}.q_a_norm.weight")
            q = torch.einsum("bsr,ndr->bnsd", latent, weights[f"{name}.q_b.weight"])
        down = x @ weights[f"{name}.kv_a.weight"].t()
        latent = latent_norm(down[..., :rank], f"{name}.kv_a_norm.weight")
        kv = torch.einsum("bsr,ndr->bnsd", latent, weights[f"{name}.kv_b.weight"])
        key = rotate(down[..., rank:].unsqueeze(1), kind, rope_size)
        k = torch.cat((key.expand(b, heads, s, rope_size), kv[..., : mla.qk_nope_head_dim]), dim=-1)
        q = torch.cat((rotate(q[..., :rope_size], kind, rope_size), q[..., rope_size:]), dim=-1)
        return q, k, kv[..., mla.qk_nope_head_dim :]

    def logit_scale(kind: Mapping[str, Any]) -> float:
        scaling = kind["rope_scaling"] if kind["position"] == "rope" else None
        scale = 1 / math.sqrt(d)
        if mla is not None and scaling is not None and scaling.mscale_all_dim:
            scale *= (1 + 0.1 * scaling.mscale_all_dim * math.log(scaling.factor)) ** 2
        return model.attention_scale or scale

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        gain = weights[f"{name}.weight"]
        if model.norm == "layernorm":
            return F.layer_norm(x, (h,), gain, weights[f"{name}.bias"], model.norm_eps)
        return x / (x.pow(2).mean(-1, keepdim=True) + model.norm_eps).sqrt() * (gain + first_gain)

    def head_norm(x: torch.Tensor, name: str) -> torch.Tensor:
        if name not in weights:
            return x
        gain = weights[name] + first_gain
        if model.qk_norm == "all_heads":  # x [b, n, s, d], gains [n, d]
            return x / (x.pow(2).mean((1, 3), keepdim=True) + model.norm_eps).sqrt() * gain.unsqueeze(1)
        return x / (x.pow(2).mean(-1, keepdim=True) + model.norm_eps).sqrt() * gain

    def rotate(x: torch.Tensor, layer: Mapping[str, Any], size: int = d) -> torch.Tensor:
        """x [b, n, s, d] by complex multiplication, pairing dim i with dim i + r/2 of the first r; the others stay."""
        if layer["position"] != "rope":
            return x
        r = int(size * layer["rotary_share"])
        frequencies, length = rope_frequencies(r, layer["rope_base"], layer["rope_scaling"], s)
        angles = position_ids.unsqueeze(-1) * frequencies
        turn = torch.polar(torch.full_like(angles, length), angles).unsqueeze(1)
        pairs = torch.complex(x[..., : r // 2], x[..., r // 2 : r]) * turn
        return torch.cat((pairs.real, pairs.imag, x[..., r:]), dim=-1)

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: int) -> torch.Tensor:
        return F.linear(x, weight.reshape(out, -1), None if bias is None else bias.reshape(-1))

    def mlp(x: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor, name: str = "") -> torch.Tensor:
        """An MLP of any width; its biases, where there are any, by the name."""
        gated = model.activation in ("swiglu", "geglu", "geglu_tanh")
        f = down_weight.shape[-1]
        up_bias = weights.get(f"{name}.{'gate_up' if gated else 'up'}.bias")
        y = linear(x, up_weight, up_bias, 2 * f if gated else f)
        if gated:
            gate, up = y.split(f, dim=-1)
            approximate = "tanh" if model.activation == "geglu_tanh" else "none"
            is_silu = model.activation == "swiglu"
            y = (gate * torch.sigmoid(gate) if is_silu else F.gelu(gate, approximate=approximate)) * up
        elif model.activation == "relu2":
            y = torch.where(y > 0, y * y, torch.zeros_like(y))
        else:
            y = F.gelu(y, approximate="tanh" if model.activation == "gelu_tanh" else "none")
        return linear(y, down_weight, weights.get(f"{name}.down.bias"), h)

    def experts(x: torch.Tensor, name: str, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Every expert on every token, times a weight that is 0 for most; and the losses on the load, in sums over tokens."""
        moe = model.moe
        assert moe is not None
        logits = x @ weights[f"{name}.router.weight"].t()
        scores = logits.softmax(-1) if moe.score == "softmax" else torch.sigmoid(logits)
        ranked = scores + weights[f"{name}.router.bias"].detach() if moe.has_bias else scores
        is_chosen, is_counted = torch.zeros_like(scores), torch.zeros_like(scores)
        for row in range(b):
            for column in range(s):
                if moe.force_balanced:
                    chosen = [(column * moe.top_k + j) % moe.num_experts for j in range(moe.top_k)]
                else:
                    chosen = oracle_choice(ranked[row, column].tolist(), moe)
                is_chosen[row, column, chosen] = 1.0
                # Equation 18 counts the best scores, whatever bias and groups make of them.
                if moe.balance.sequence_counts == "scores":
                    of_token = scores[row, column].tolist()
                    chosen = sorted(range(moe.num_experts), key=lambda one: (-of_token[one], one))[: moe.top_k]
                is_counted[row, column, chosen] = 1.0
        if load is not None:
            load[layer] = load.get(layer, 0) + is_chosen.sum((0, 1)).long()
        gains = scores * is_chosen
        if moe.normalize:
            gains = gains / (gains.sum(-1, keepdim=True) + 1e-20)
        gains = gains * moe.scaling
        kind = "gate_up" if model.activation in ("swiglu", "geglu", "geglu_tanh") else "up"
        y = torch.zeros_like(x)
        for expert in range(moe.num_experts):
            of_expert = [weights[f"{name}.experts.{part}.weight"][expert] for part in (kind, "down")]
            y = y + gains[..., expert : expert + 1] * mlp(x, *of_expert)
        if moe.shared_experts:
            y = y + mlp(x, weights[f"{name}.shared.{kind}.weight"], weights[f"{name}.shared.down.weight"])
        fractions = is_counted.mean(1) * moe.num_experts / moe.top_k
        shares = (scores / scores.sum(-1, keepdim=True)).mean(1)
        extra = moe.balance.sequence_loss * s * (fractions * shares).sum()
        return y, extra + moe.balance.z_loss * logits.logsumexp(-1).square().sum()

    on_load = torch.zeros((), dtype=torch.float64)
    x = F.embedding(tokens, weights["embedding.word.weight"]) * model.embedding_multiplier
    if model.position == "learned":
        x = x + weights["embedding.position.weight"][position_ids]
    x = hidden_dropout(x, "embedding.dropout")

    same_document = torch.ones(b, s, s, dtype=torch.bool)
    if documents is not None:
        same_document = documents.unsqueeze(-1) == documents.unsqueeze(-2)

    def run_layer(layer: int, x: torch.Tensor) -> torch.Tensor:
        nonlocal on_load
        name = f"layers.{layer}.attention"
        kind = fields_of_layer(model, layer)
        distance = torch.arange(s).view(-1, 1) - torch.arange(s)
        is_near = distance < (s if kind["window"] is None else kind["window"])
        seen = ((distance >= 0) & is_near & same_document).unsqueeze(1)
        entry = x
        y = norm(x, f"{name}.norm") if model.norm_placement != "after" else x
        if mla is not None:
            q, k, v = through_latents(y, name, kind)
        else:
            q = linear(y, weights[f"{name}.q.weight"], weights.get(f"{name}.q.bias"), heads * d)
            kv = linear(y, weights[f"{name}.kv.weight"], weights.get(f"{name}.kv.bias"), 2 * kv_heads * d)
            q = q.view(b, s, heads, d).transpose(1, 2)
            k, v = kv.view(b, s, 2, kv_heads, d).permute(2, 0, 3, 1, 4)
            q = rotate(head_norm(q, f"{name}.q_norm.weight"), kind)
            k = rotate(head_norm(k, f"{name}.k_norm.weight"), kind)
        group = heads // kv_heads
        k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
        scores = q @ k.transpose(-1, -2) * logit_scale(kind)
        if model.attention_softcap is not None:
            scores = model.attention_softcap * torch.tanh(scores / model.attention_softcap)
        weight = scores.exp() * seen
        total = weight.sum(-1, keepdim=True)
        if kind["sinks"]:
            total = total + weights[f"{name}.sinks"].exp().view(-1, 1, 1)
        probabilities = weight / total
        n, row, column = torch.arange(heads), torch.arange(s), torch.arange(s)
        where = ((n.view(-1, 1, 1) * s + row.view(-1, 1)) * s + column).unsqueeze(0)
        probabilities = dropout(probabilities, model.attention_dropout, keys, f"{name}.dropout", where, batch_dim=0)
        mixed = (probabilities @ v).transpose(1, 2).reshape(b, s, -1)
        branch = linear(mixed, weights[f"{name}.proj.weight"], weights.get(f"{name}.proj.bias"), h)
        if model.norm_placement != "before":
            branch = norm(branch, f"{name}.post_norm")
        x = x + model.residual_multiplier * hidden_dropout(branch, f"{name}.residual_dropout")

        name = f"layers.{layer}.mlp"
        y = entry if model.parallel_block else x
        y = norm(y, f"{name}.norm") if model.norm_placement != "after" else y
        if kind["mlp"] == "moe":
            branch, extra = experts(y, name, layer)
            on_load = on_load + extra
        else:
            up = "gate_up" if f"{name}.gate_up.weight" in weights else "up"
            branch = mlp(y, weights[f"{name}.{up}.weight"], weights[f"{name}.down.weight"], name)
        if model.norm_placement != "before":
            branch = norm(branch, f"{name}.post_norm")
        return x + model.residual_multiplier * hidden_dropout(branch, f"{name}.residual_dropout")

    for layer in range(model.num_layers):
        x = run_layer(layer, x)

    head = weights["embedding.word.weight" if model.tie_embeddings else "head.weight"]

    def losses_of(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Losses [b, s] of the head's input; the z-loss is trained and not counted."""
        logits = x @ head.t() / model.logit_divisor
        if model.logit_softcap is not None:
            logits = model.logit_softcap * torch.tanh(logits / model.logit_softcap)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(b, s)
        extra = model.z_loss * logits.logsumexp(-1).square()
        return losses + (extra - extra.detach())

    x = norm(x, "final_norm")
    of_next, ahead = (losses_of(x, labels) * loss_mask).sum(), []
    if model.mtp is not None:
        for distance in range(1, model.mtp.num_layers + 1):
            layer = model.num_layers + distance - 1
            name = f"layers.{layer}.mtp"
            counted = torch.zeros_like(loss_mask)
            token, target = torch.zeros_like(labels), torch.zeros_like(labels)
            for place in range(s):
                if place + distance <= s:
                    token[:, place] = labels[:, place + distance - 1]
                if place + distance < s:
                    target[:, place] = labels[:, place + distance]
                    counted[:, place] = loss_mask[:, place : place + distance + 1].all(1)
                    counted[:, place] &= same_document[:, place, place + distance]
            embedded = F.embedding(token, weights["embedding.word.weight"]) * model.embedding_multiplier
            embedded = hidden_dropout(embedded, f"{name}.embedding.dropout")
            joined = torch.cat((norm(embedded, f"{name}.embedding_norm"), norm(x, f"{name}.hidden_norm")), dim=-1)
            x = norm(run_layer(layer, joined @ weights[f"{name}.projection.weight"].t()), f"{name}.norm")
            ahead.append(((losses_of(x, target) * counted).sum(), int(counted.sum())))
    return OracleLosses(of_next, ahead, on_load)


def oracle_choice(scores: list[float], moe: MoEConfig) -> list[int]:
    """The experts of one token by their scores, from the rule's words: best groups first, then experts, ties to the lower."""
    size = moe.num_experts // moe.groups
    by_group = [scores[group * size : (group + 1) * size] for group in range(moe.groups)]
    counted = 1 if moe.group_score == "max" else 2
    value = [sum(sorted(of_group, reverse=True)[:counted]) for of_group in by_group]
    groups = sorted(range(moe.groups), key=lambda group: (-value[group], group))[: moe.top_groups]
    eligible = [expert for expert in range(moe.num_experts) if moe.groups == 1 or expert // size in groups]
    return sorted(eligible, key=lambda expert: (-scores[expert], expert))[: moe.top_k]
