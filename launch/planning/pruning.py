"""Estimate, before a layout is timed, how much of it must be recomputed to fit.

A pipeline rank keeps about as many layers' tensors as the model has layers, if all its microbatches are in flight:

    kept = tokens of a microbatch x layers x min(1, microbatches / pp) x bytes per token and layer

What of it exceeds a device's memory must be recomputed as whole layers, of which only the input is kept.
"""

from collections.abc import Sequence
from dataclasses import replace

from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.launch.planning.legal_layouts import Block
from triaxis.models.predict.cut import Memo
from triaxis.models.predict.layer_terms import block_terms, per_token
from triaxis.models.predict.recompute_choice import choice_for_layers, worthwhile_parts
from triaxis.models.predict.terms import Sizes

FEWEST_IN_FLIGHT = 0.8
"""Layers in flight on the fullest rank, at least, over those of an even cut."""

LEAST_AGAIN = 0.25
"""Share of a microbatch's seconds that a forward of all layers takes at least: 1/3 of the products, less the head's."""


LEFT_OUT = (
    "tp without sequence parallelism, micro batches that are no power of two, and micro batches with which whole layers "
    "must be recomputed"
)
"""What a search leaves out of more layouts."""


def share_recomputed(config: Config, sizes: ParallelSizes, micro: int, usable_bytes: int, memo: Memo) -> float:
    """Estimate the least share of layers that must be recomputed whole, from 0 to 1.

    Args:
        config: the run in a layout's sizes.
        micro: samples per forward.
        usable_bytes: memory of a device that may be filled.
        memo: cache of earlier answers.
    """
    if config.offload.num_layers:
        return 0.0
    key = "kept", sizes.tp, sizes.cp, sizes.ep, sizes.etp, config.parallel.sequence_parallel
    if key not in memo:
        memo[key] = _bytes_per_token(config, sizes)
    kept, kept_again = memo[key]
    model, train = config.model, config.train
    rounds = train.global_batch_size / (micro * sizes.dp * sizes.pp)
    in_flight = FEWEST_IN_FLIGHT * model.num_layers * min(1.0, rounds) * micro * model.seq_length / sizes.cp
    if in_flight * kept <= usable_bytes:
        return 0.0
    return min(1.0, (in_flight * kept - usable_bytes) / (in_flight * (kept - kept_again)))


def _bytes_per_token(config: Config, sizes: ParallelSizes) -> tuple[float, float]:
    """Count bytes that a layer keeps per token: with all parts recomputed that are worth it, and recomputed whole."""
    parts = worthwhile_parts(config, sizes)
    choice = choice_for_layers(config.recompute, granularity="selective", modules=parts) if parts else config.recompute
    trial, at = config.model_copy(update={"recompute": choice}), Sizes.of(config, sizes)
    layers = {config.model.layer_kind(each): each for each in range(config.model.num_layers)}.values()
    kept = min(per_token(block_terms(trial, sizes, each)) for each in layers)
    return float(kept), float(at.w * at.h * at.shard)


def likely(groups: Sequence[Block], usable_bytes: int) -> list[Block]:
    """Leave out what `LEFT_OUT` names."""
    memo: Memo = {}
    with_sp = {one.sizes for one in groups if one.config.parallel.cuts_sequence}
    found = []
    for one in groups:
        parallel = one.config.parallel
        if parallel.tp > 1 and not parallel.cuts_sequence and one.sizes in with_sp:
            continue
        micros = [
            micro
            for micro in one.micro_batches
            if micro.bit_count() == 1 and not share_recomputed(one.config, one.sizes, micro, usable_bytes, memo)
        ]
        if micros:
            found.append(replace(one, micro_batches=micros))
    return found
