"""Counts the FLOPs in a training step.

A multiply-add counts as two FLOPs. The forward needs 2 per weight and token, the backward twice as many: 6 in all. The model has
N weights in its GEMMs (the LM head counts once), L layers, a heads of size d, hidden size h and k experts per token. The sequence
length is s. Per token:

    model, causal      6 N + 6 L a d s      a query sees s/2 keys on average
    experts            N counts only what a token passes through, the router, k experts and the shared experts ("active")
    multi-token        each multi-token prediction layer adds 1 to L, and its 2 h^2 projection and the head once more to N
    model, non-causal  6 N + 12 L a d s     as if every query saw all s keys (2205.05198, NVIDIA's published tables)
    hardware           causal, plus the forwards that recompute repeats, plus the head's padded columns
    a window W         a query sees W - W^2 / 2s keys, not s/2 (causal only)
    documents          with `data.attention: within`, each document's length replaces s (`engine/data/document_statistics.py`)

MFU is model FLOP/s divided by the peak. HFU is hardware FLOP/s divided by the peak. Papers' formulas for MFU differ by
up to a third, so the formula is printed with the number.
"""

from collections.abc import Sequence
from typing import NamedTuple

from triaxis.engine.config.quantities.layer_products import token_weights
from triaxis.engine.config.quantities.stage_work import flops_of_a_key, layer_weights
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.data.document_statistics import DocumentStatistics, one_document_per_sample

CONVENTION = "6 x GEMM weights + 6 x layers x heads x head size x sequence (causal)"
"""Formula for `model_flops_per_token`, printed next to that number; valid if queries and values have equal sizes."""


def gemm_weights(model: ModelConfig) -> int:
    """Count the weights in the GEMMs for one token.

    The GEMMs are all linear layers and the head, tied or not. Only the experts that the token uses count ("active"). The head
    counts without vocabulary padding, once and again for each multi-token prediction layer.
    """
    heads = (1 + model.num_mtp_layers) * model.vocab_size * model.hidden_size
    return sum(layer_weights(model, kind) for kind in model.kinds) + heads


def model_flops_per_token(
    model: ModelConfig, *, causal: bool = True, documents: DocumentStatistics | None = None
) -> int:
    """Count the FLOPs per token that a forward and backward need mathematically.

    The vocabulary is the logical one. Norms, activations, embedding look-ups and the softmax are left out, as in published formulas
    (2104.04473 appendix, 2205.05198 appendix A).

    Args:
        model: model sizes.
        causal: whether to count only the attention scores that a causal mask leaves.
        documents: statistics of the documents that attention stays within; None if it crosses documents.
    """
    return 3 * (2 * gemm_weights(model) + sum(core_flops_forward(model, documents, causal=causal)))


def convention(model: ModelConfig, documents: DocumentStatistics | None = None) -> str:
    """Format the formula for `model_flops_per_token`, with the share of attention left by windows or documents."""
    seen, whole = sum(core_flops_forward(model, documents)), sum(core_flops_forward(model, None, causal=False)) // 2
    # A score multiplies one query's elements; the weighted sum multiplies one value's.
    sizes = "head size" if model.value_size == model.head_size else "mean size of queries and values"
    stated = CONVENTION.replace("head size", sizes)
    stated = stated.replace("GEMM weights", "active GEMM weights") if model.has_experts else stated
    if seen == whole:
        return stated
    within = "windows" if documents is None else "documents"
    return f"{stated}, {seen / whole:.0%} of the latter within {within}"


def attention_share(model: ModelConfig, documents: DocumentStatistics) -> float:
    """Compute attention FLOPs if attention stays within documents, divided by those if it crosses documents."""
    return sum(core_flops_forward(model, documents)) / sum(core_flops_forward(model, None))


def cost_of_imbalance(model: ModelConfig, documents: DocumentStatistics) -> float:
    """Compute the busiest dp rank's extra FLOPs, due to unequal documents, as a share of the mean rank's FLOPs."""
    cores = zip(core_flops_forward(model, documents), model.kinds, strict=True)
    more = {kind.window: documents.imbalance(kind.window) - 1 for kind in set(model.kinds)}
    return 3 * sum(core * more[kind.window] for core, kind in cores) / model_flops_per_token(model, documents=documents)


def cost_of_cp_imbalance(model: ModelConfig, documents: DocumentStatistics, imbalance: float) -> float:
    """Compute the busiest cp rank's extra attention FLOPs, as a share of the mean rank's FLOPs.

    Args:
        model: model sizes.
        documents: statistics of the documents that attention stays within.
        imbalance: largest attention work on a rank, divided by the mean (`triaxis.engine.context_parallel.imbalance`).
    """
    attention = 3 * sum(core_flops_forward(model, documents))
    return (imbalance - 1) * attention / model_flops_per_token(model, documents=documents)


def hardware_flops_per_token(
    model: ModelConfig,
    recompute: RecomputeConfig,
    layers_per_chunk: Sequence[int],
    documents: DocumentStatistics | None = None,
) -> int:
    """Count the executed FLOPs per token, with causal attention, padded vocabulary and recomputed forwards.

    Scores that flash attention recomputes in its backward are not counted. Nor are kv projections for replicated heads. In latent
    attention, work that cp or tp ranks repeat on latents is not counted.

    Args:
        model: model sizes.
        recompute: resolved setting, never `auto`. `full` with method `uniform` repeats every layer's forward. With method
            `block`, only the first `num_layers` layers in every chunk repeat the whole forward. Other layers repeat the chosen
            parts.
        layers_per_chunk: number of transformer layers in each of the pp x vpp chunks, in model order.
        documents: statistics of the documents that attention stays within; None if it crosses documents.
    """
    heads = 1 + model.num_mtp_layers
    padding = heads * 3 * 2 * (model.padded_vocab_size - model.vocab_size) * model.hidden_size
    again = sum(layer.again for layer in layer_flops(model, recompute, layers_per_chunk, documents))
    return model_flops_per_token(model, documents=documents) + padding + again


class LayerFlops(NamedTuple):
    """FLOPs per token in one layer.

    Attributes:
        gemms: forward FLOPs in the linear layers. Input gradients need as many again, and so do weight gradients.
        attention: forward FLOPs for scores and weighted sum. Their input gradients need twice as many.
        again: forward FLOPs that are repeated by recompute.
    """

    gemms: int
    attention: int
    again: int


def layer_flops(
    model: ModelConfig,
    recompute: RecomputeConfig,
    layers_per_chunk: Sequence[int],
    documents: DocumentStatistics | None = None,
) -> list[LayerFlops]:
    """Count each layer's FLOPs, in model order. Arguments are as in `hardware_flops_per_token`."""
    cores = core_flops_forward(model, documents)
    assert recompute.granularity != "auto", "triaxis.models.predict.rank_memory.resolve_recompute comes first"
    limit = 0
    if recompute.granularity == "full":
        limit = recompute.num_layers if recompute.method == "block" else len(model.kinds)
    place_in_chunk = [place for layers in layers_per_chunk for place in range(layers)]
    layers = []
    for place, core, kind in zip(place_in_chunk, cores, model.kinds, strict=True):
        gemms, weights = 2 * layer_weights(model, kind), token_weights(model, kind)
        first_gemms = 2 * sum(weights.get(f"{mlp}.up", 0) for mlp in ("mlp", "mlp.shared", "mlp.experts"))
        in_part = {"attention": core + 2 * weights.get("attention.kv_up", 0), "mlp": first_gemms}
        parts = sum(in_part.get(part, 0) for part in recompute.parts)
        layers.append(LayerFlops(gemms, core, gemms + core if place < limit else parts))
    return layers


def head_flops(model: ModelConfig) -> int:
    """Count the head's forward FLOPs per token, padded columns included."""
    return 2 * model.padded_vocab_size * model.hidden_size


def core_flops_forward(
    model: ModelConfig, documents: DocumentStatistics | None = None, *, causal: bool = True
) -> list[int]:
    """Count each layer's forward FLOPs per token for attention scores and weighted sum.

    Args:
        documents: statistics of the documents that attention stays within; None if it crosses documents.
        causal: whether a query sees only earlier keys, within the layer's window if any; if False, all keys.
    """
    of_a_key = flops_of_a_key(model)
    if not causal:
        return [of_a_key * model.seq_length] * len(model.kinds)
    statistics = documents or one_document_per_sample(model.seq_length)
    kinds = model.kinds
    keys = {window: statistics.keys_per_query(window) for window in {kind.window for kind in kinds}}
    return [round(of_a_key * keys[kind.window]) for kind in kinds]
