"""FLOPs that a step does not need where parameters are frozen, counted from the configuration alone (no torch here).

    a layer before the part with a backward    its backward: twice its forward
    a frozen weight within the part            its gradient: as much as its product's forward

The embedding is a look-up and costs nothing. Layers are those of `triaxis.engine.telemetry.record.flops`.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from triaxis.engine.config.activations import RecomputeConfig
from triaxis.engine.config.groups import is_frozen
from triaxis.engine.config.plan import stages_of
from triaxis.engine.config.tree import Config
from triaxis.engine.data.document_statistics import DocumentStatistics
from triaxis.engine.telemetry.record.flops import LayerFlops, head_flops, layer_flops
from triaxis.models.specs import layer_specs
from triaxis.models.trained_part import TrainedPart, head_is_frozen, weights_of_products


class TrainedFlops(NamedTuple):
    """FLOPs of one layer's passes per token.

    Attributes:
        forward: of products and attention.
        input_grad: of the backward without weight gradients, with what recomputation repeats.
        weight_grad: of products whose weights are trained.
        again: of the input gradient, what recomputation repeats.
    """

    forward: int
    input_grad: int
    weight_grad: int
    again: int


class Unneeded(NamedTuple):
    """FLOPs per token that are not made because of frozen parameters: of the model's mathematics, and of the hardware's."""

    model: int
    hardware: int


def trained_layers(
    config: Config, recompute: RecomputeConfig, documents: DocumentStatistics | None = None
) -> list[TrainedFlops]:
    """Count the FLOPs of each layer's passes.

    Args:
        recompute: what `config.recompute` came to.
        documents: within which tokens attend; None: across them.
    """
    part = TrainedPart.of(config)
    return [
        TrainedFlops(
            one.gemms + one.attention,
            one.gemms + 2 * one.attention + one.again if layer >= part.first_layer else 0,
            one.gemms - 2 * frozen_weights(config, layer) if layer >= part.first_layer else 0,
            one.again if layer >= part.first_layer else 0,
        )
        for layer, one in enumerate(_layers(config, recompute, part, documents))
    ]


def _layers(
    config: Config, recompute: RecomputeConfig, part: TrainedPart, documents: DocumentStatistics | None
) -> list[LayerFlops]:
    """Count the layers' FLOPs; those that are recomputed are counted from the first one with a backward in its chunk."""
    counts: list[int] = []
    for stage in stages_of(config):
        before = part.layers_before(stage)
        counts += [before, len(stage.layers) - before]
    return layer_flops(config.model, recompute, counts, documents)


def frozen_weights(config: Config, layer: int) -> int:
    """Count the frozen weights of a layer that a token is multiplied with; of experts, the share of its own."""
    model = config.model
    products = {
        f"layers.{layer}.{name}.weight" for names in weights_of_products(model, layer).values() for name in names
    }
    total = Fraction(0)
    for spec in layer_specs(model, layer):
        if is_frozen(spec.name, config.optimizer) and (spec.name in products or spec.name.endswith("router.weight")):
            share = Fraction(1)
            if spec.ep_dim is not None and model.moe is not None:
                share = Fraction(model.moe.top_k, model.moe.num_experts)
            total += share * spec.numel
    return round(total)


def unneeded_flops(
    config: Config,
    recompute: RecomputeConfig,
    layers_per_chunk: Sequence[int],
    documents: DocumentStatistics | None = None,
) -> Unneeded:
    """Count the FLOPs per token that frozen parameters spare; arguments as of `hardware_flops_per_token`."""
    whole = layer_flops(config.model, recompute, layers_per_chunk, documents)
    trained = trained_layers(config, recompute, documents)
    model = sum(
        2 * (one.gemms + one.attention) - (mine.input_grad - mine.again + mine.weight_grad)
        for one, mine in zip(whole, trained, strict=True)
    )
    again = sum(one.again for one in whole) - sum(mine.again for mine in trained)
    heads = (1 + config.model.num_mtp_layers) * head_is_frozen(config)
    logical = 2 * config.model.vocab_size * config.model.hidden_size
    return Unneeded(model + heads * logical, model + heads * head_flops(config.model) + again)
