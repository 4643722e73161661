"""Costs of a schedule's actions by their FLOPs (no torch here).

    F   GEMMs + attention of the stage's layers, and the head on the last stage
    I   the same GEMMs, attention twice, what is recomputed; the head twice, since its weight gradient does not wait
    W   the GEMMs of the layers

Norms, the embedding and collectives are left out. Tokens attend across documents.
"""

from triaxis.engine.config.plan import stages_of
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.pipeline.simulate import Costs
from triaxis.engine.telemetry.record.flops import head_flops, layer_flops
from triaxis.models.predict.frozen_flops import trained_layers
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.trained_part import head_is_frozen

UNIT = "forwards of a mean layer (by FLOPs)"
"""Of `flops_costs`."""


def flops_costs(config: Config, sizes: ParallelSizes) -> Costs:
    """Count the FLOPs of each stage's actions, in forwards of a mean layer; transfers take nothing.

    Args:
        config: with any recomputation.
        sizes: all axes; tp and cp divide all stages alike.

    Raises:
        ConfigError: as `resolve_recompute`.
    """
    model, recompute, stages = config.model, resolve_recompute(config, sizes).recompute, stages_of(config)
    layers_per_chunk = [len(stage.layers) for stage in stages]
    layers = trained_layers(config, recompute)
    usual = layer_flops(model, recompute, layers_per_chunk)
    unit = sum(layer.gemms + layer.attention for layer in usual) / len(usual)
    forward, input_grad, weight_grad = [], [], []
    for stage in stages:
        own, goes_back = [layers[number] for number in stage.layers], 1 - head_is_frozen(config)
        head = head_flops(model) * (stage.has_head + stage.num_mtp)
        head_again = head if recompute.head_tokens is not None else 0
        forward.append((sum(layer.forward for layer in own) + head) / unit)
        # The head's weight gradient is computed at once, with that of its input.
        input_grad.append((sum(layer.input_grad for layer in own) + (1 + goes_back) * head + head_again) / unit)
        weight_grad.append(sum(layer.weight_grad for layer in own) / unit)
    return Costs(forward, input_grad, weight_grad)
