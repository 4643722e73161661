"""Estimate the costs of a schedule's actions by their FLOPs alone.

    F   forward: GEMMs and attention of the stage's layers, and the head on the last stage
    I   input gradient: the same GEMMs, attention twice, and what is recomputed; the head twice, for both of its gradients
    W   weight gradient: the layers' GEMMs

The head's weight gradient is never deferred, so it belongs to I. Norms, the embedding and collectives are left out. Attention
counts all earlier tokens of a sample, also those of other documents.
"""

from triaxis.engine.config.quantities.head_pieces import head_tokens
from triaxis.engine.config.quantities.plan import stages_of
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.pipeline.simulate import Costs
from triaxis.engine.telemetry.record.flops import head_flops, layer_flops
from triaxis.models.predict.rank_memory import resolve_recompute

UNIT = "forwards of a mean layer (by FLOPs)"
"""Unit of the costs that `flops_costs` counts."""


def flops_costs(config: Config, sizes: ParallelSizes) -> Costs:
    """Count the FLOPs of each stage's actions, in units of one mean layer's forward; transfers between stages cost 0.

    Args:
        config: the run's configuration; an open `recompute` is resolved first.
        sizes: every axis's size; tp and cp divide all stages alike.

    Raises:
        ConfigError: `recompute.granularity` is auto, and no choice fits in its budget.
    """
    model, recompute, stages = config.model, resolve_recompute(config, sizes).recompute, stages_of(config)
    layers_per_chunk = [len(stage.layers) for stage in stages]
    layers = layer_flops(model, recompute, layers_per_chunk)
    unit = sum(layer.gemms + layer.attention for layer in layers) / len(layers)
    forward, input_grad, weight_grad = [], [], []
    for stage in stages:
        own = [layers[number] for number in stage.layers]
        head = head_flops(model) * (stage.has_head + stage.num_mtp)
        # The head computes its weight gradient at once, together with its input gradient: in pieces, in the forward.
        of_head, of_head_back = (head, 2 * head) if head_tokens(config) is None else (3 * head, 0)
        forward.append((sum(layer.gemms + layer.attention for layer in own) + of_head) / unit)
        of_layers = sum(layer.gemms + 2 * layer.attention + layer.again for layer in own)
        input_grad.append((of_layers + of_head_back) / unit)
        weight_grad.append(sum(layer.gemms for layer in own) / unit)
    return Costs(forward, input_grad, weight_grad)
