"""Count each layer's and the head's work in FLOPs, from the model's sizes alone.

A forward has these FLOPs per token; h is the hidden size, V the padded vocabulary size:

    a layer    2 per weight in its GEMMs, plus, in attention, 2 x keys that a query sees x heads x (query size + value size)
    experts    the weights of the router, a token's k experts and the shared ones replace an MLP's weights
    the head   2 h V;  the embedding is a look-up and costs nothing
    a multi-token prediction layer   a layer, 2 x 2 h^2 for its projection, and the head once more, all on the last stage

A backward has twice as many FLOPs in each row, so each row's share of the work is the same.
`engine/telemetry/record/flops.py` adds up the same terms for a step.
"""

from triaxis.engine.config.quantities.layer_products import token_weights
from triaxis.engine.config.schema.layer_kinds import LayerKind
from triaxis.engine.config.schema.model import ModelConfig


def keys_of(length: int, window: int | None) -> float:
    """Sum, over `length` consecutive tokens, the number of keys that a token's query sees: causal, at most `window` keys."""
    seen = length if window is None else min(length, window)
    return seen * (length - seen / 2)


def flops_of_a_key(model: ModelConfig) -> int:
    """Count attention's FLOPs, over all heads, for one key that a query sees: its score, and its value in the weighted sum."""
    return 2 * model.num_attention_heads * (model.head_size + model.value_size)


def layer_weights(model: ModelConfig, kind: LayerKind) -> int:
    """Count the weights in a layer's GEMMs that one token is multiplied with."""
    return sum(token_weights(model, kind).values()) + model.own_costs.weights


def layers_forward_flops(model: ModelConfig) -> tuple[int, ...]:
    """Each layer's forward FLOPs per token; a sample counts as one document, since document lengths are not known yet."""
    kinds = model.kinds[: model.num_layers]
    flops = {kind: _of_layer(model, kind) for kind in set(kinds)}
    return tuple(flops[kind] for kind in kinds)


def head_forward_flops(model: ModelConfig) -> int:
    """The last stage's forward FLOPs per token, without those of the model's own layers.

    They cover the output head (padded columns included) and the multi-token prediction layers, each of which runs the head again.
    """
    head = 2 * model.hidden_size * model.padded_vocab_size
    ahead = model.kinds[model.num_layers :]
    return head + sum(_of_layer(model, kind) + head for kind in ahead)


def _of_layer(model: ModelConfig, kind: LayerKind) -> int:
    s = model.seq_length
    return 2 * layer_weights(model, kind) + round(flops_of_a_key(model) * keys_of(s, kind.window) / s)
