"""Work of each layer and of the head in FLOPs, from the model's sizes alone.

    a layer    2 per weight of its GEMMs, and GEMMs of (keys that a query sees) x heads x size of a query, and of a value
    experts    in place of an MLP: the router, a token's k experts and the shared ones
    the head   2 h V;  the embedding is a look-up and costs nothing
    a layer of multi-token prediction   a layer, 2 x 2 h^2 of its projection, and the head once more, all on the last stage

Per token and of a forward; a backward has twice as much of each, so shares of work are the same. `engine/telemetry/record/flops.py`
adds up the same terms for a step.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the sections import the plan, which imports this module
    from triaxis.engine.config.attention_kinds import LayerKind
    from triaxis.engine.config.model import ModelConfig


def keys_of(length: int, window: int | None) -> float:
    """Sum the keys that the queries of `length` consecutive tokens see, causal, with at most `window` keys each."""
    seen = length if window is None else min(length, window)
    return seen * (length - seen / 2)


def flops_of_a_key(model: "ModelConfig") -> int:
    """Count the FLOPs of attention for each key that a query sees: its score and its part of the weighted sum."""
    return 2 * model.num_attention_heads * (model.head_size + model.value_size)


def attention_weights(model: "ModelConfig") -> int:
    """Count the weights of the GEMMs before and behind a layer's attention."""
    a, d, h, mla = model.num_attention_heads, model.head_size, model.hidden_size, model.mla
    if mla is None:
        return 2 * (a + model.kv_heads) * d * h
    queries = (mla.q_lora_rank or h) * a * d
    return mla.latent_size * h + queries + made_from_latents(model) + a * mla.v_head_dim * h


def made_from_latents(model: "ModelConfig") -> int:
    """Count the weights by which keys and values are made from latents, which is a part of attention where that is recomputed."""
    mla = model.mla
    if mla is None:
        return 0
    return mla.kv_lora_rank * model.num_attention_heads * (mla.qk_nope_head_dim + mla.v_head_dim)


def layer_weights(model: "ModelConfig", kind: "LayerKind") -> int:
    """Count the weights of a layer's GEMMs that a token is multiplied with: of experts, those of its own."""
    router = 0 if model.moe is None or not kind.has_experts else model.moe.num_experts * model.hidden_size
    mlp = (model.activation_kind.num_inputs + 1) * mlp_width(model, kind) * model.hidden_size
    return attention_weights(model) + router + mlp + model.own_costs.weights


def projection_weights(model: "ModelConfig", kind: "LayerKind") -> int:
    """Count the weights by which a layer of multi-token prediction joins a token's embedding to what is known of those before."""
    return 2 * model.hidden_size * model.hidden_size if kind.is_mtp else 0


def mlp_width(model: "ModelConfig", kind: "LayerKind") -> int:
    """Return the inner width of what a token goes through in place of an MLP: of its k experts and the shared ones together."""
    moe = model.moe
    if moe is None or not kind.has_experts:
        return model.ffn_size
    return moe.top_k * moe.ffn_hidden_size + moe.shared_size


def layers_forward_flops(model: "ModelConfig") -> tuple[int, ...]:
    """Return the FLOPs of each layer's forward per token; samples count as one document, whose lengths are not known yet."""
    return tuple(_of_layer(model, kind) for kind in model.kinds[: model.num_layers])


def head_forward_flops(model: "ModelConfig") -> int:
    """Return the FLOPs of the last stage's forward per token besides its own layers, padded columns included.

    That is the output head, and the layers of multi-token prediction, each with the head again.
    """
    head = 2 * model.hidden_size * model.padded_vocab_size
    ahead = model.kinds[model.num_layers :]
    return head + sum(_of_layer(model, kind) + 2 * projection_weights(model, kind) + head for kind in ahead)


def _of_layer(model: "ModelConfig", kind: "LayerKind") -> int:
    s = model.seq_length
    return 2 * layer_weights(model, kind) + round(flops_of_a_key(model) * keys_of(s, kind.window) / s)
