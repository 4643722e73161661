"""Count the peak bytes that a stage holds while experts run, from the configuration alone.

The peak is a sum: what the microbatch has kept by then (`models/predict/activation_memory.py`), and the running experts'
temporaries (`models/predict/experts/temporaries.py`).
"""

from collections.abc import Sequence
from fractions import Fraction

from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.models.predict.activation_memory import LOSS_MASK, LayerGroup, deferred_terms, head_terms, kept_bytes
from triaxis.models.predict.experts.temporaries import temporaries
from triaxis.models.predict.layer_terms import per_token
from triaxis.models.predict.mtp_terms import embedding_terms
from triaxis.models.predict.terms import Sizes, Term, tokens_of_microbatch
from triaxis.models.specs import StageContents


def most_at_work(
    config: Config, sizes: ParallelSizes, stage: StageContents, groups: Sequence[LayerGroup], load: Fraction
) -> tuple[int, int]:
    """Count the peak bytes that one microbatch holds on one stage while experts run: (in its forward, in its backward).

    Both numbers are 0 if the stage has no expert layer.

    Args:
        groups: the stage's layer groups, from `activation_memory.layer_groups`.
        load: rows that the rank's experts get, over the rows under balanced routing.
    """
    if not any(config.model.layer_kind(layer).has_experts for layer in stage.layers):
        return 0, 0
    at, num_own = Sizes.of(config, sizes), len(groups) - stage.num_mtp
    in_forward, in_backward = (_bytes(config, each) for each in temporaries(config, sizes, load))
    # The loss mask belongs to the batch.
    head = _of_terms(config, [term for term in head_terms(config, sizes, at) if term.tensor != LOSS_MASK])
    kept = kept_bytes(config, sizes, stage, groups) - (head if stage.has_head else 0)
    forward = backward = waiting = 0
    for index, (layers, is_again) in reversed(list(enumerate(_layers_of_groups(config, stage)))):
        group, below = groups[index], groups[index - 1] if index else LayerGroup(0, 0)
        beside = kept + group.moved + below.moved
        if any(config.model.layer_kind(layer).has_experts for layer in layers):
            forward = max(forward, beside + in_forward)
            if is_again:
                # A recomputed layer runs forward, then backward.
                again = group.whole - group.kept - group.moved + max(in_forward, in_backward)
                backward = max(backward, waiting + beside + again)
            else:
                backward = max(backward, waiting + beside + in_backward)
        if config.schedule.defers_weight_gradients:
            waiting += sum(_of_terms(config, deferred_terms(config, sizes, layer, load)) for layer in layers)
        kept -= group.kept
        if index >= num_own:
            # Below an MTP layer lie its embedding and the previous token's head.
            kept -= _of_terms(config, embedding_terms(config, at)) + head
    return forward, backward


def _layers_of_groups(config: Config, stage: StageContents) -> list[tuple[Sequence[int], bool]]:
    """List a pair for each of a stage's layer groups: the group's layers, and whether they are recomputed as a whole."""
    recompute, num_layers = config.recompute, len(stage.layers)
    num_own, num_again, size = num_layers - stage.num_mtp, 0, 1
    if recompute.granularity == "full":
        is_uniform = recompute.method == "uniform"
        num_again = num_layers if is_uniform else min(num_layers, recompute.num_layers)
        size = recompute.num_layers if is_uniform else 1
    of_own = min(num_own, num_again)
    again = [stage.layers[start : min(start + size, of_own)] for start in range(0, of_own, size)]
    # MTP layers are recomputed one by one.
    again += [stage.layers[place : place + 1] for place in range(num_own, num_again)]
    return [*((layers, True) for layers in again), *(((layer,), False) for layer in stage.layers[num_again:])]


def _of_terms(config: Config, terms: Sequence[Term]) -> int:
    return _bytes(config, per_token(terms))


def _bytes(config: Config, per_token: Fraction) -> int:
    """Convert bytes per token to bytes per microbatch, rounded up to a whole byte."""
    total = per_token * tokens_of_microbatch(config)
    return -(-total.numerator // total.denominator)
