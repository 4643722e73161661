"""Shrink a configuration to a small one of the same kind, which a laptop can run in float64.

Layout bugs depend on relations between sizes, such as whether heads outnumber ranks. Every relation in `launch/verify/relations.py`
is kept. Everything else becomes small.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from triaxis.engine.config.quantities.context_parallel import gathers_keys, heads_of_pieces, method_of
from triaxis.engine.config.quantities.expert_rows import dispatch_of
from triaxis.engine.config.quantities.head_pieces import head_tokens
from triaxis.engine.config.quantities.plan import data_parallel_size
from triaxis.engine.config.schema.fp8 import BLOCKS
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.tree import Config
from triaxis.launch.verify.relations import (
    MOST_ROUNDS,
    blocks_of_part,
    full_recompute_method,
    head_pieces,
    is_root_of_width,
    layer_counts,
    num_microbatches,
    rows_of_ranks,
    stage_relations,
)
from triaxis.launch.verify.shrink_attention import shrink_attention
from triaxis.launch.verify.shrink_experts import shrink_experts
from triaxis.launch.verify.shrink_layers import groups_of, kept_layers, kinds_of, needed_places

HEAD_DIM = 8
ROTATED = 4
"""Rotated elements per head with latent attention."""
LEAST_SEQ_LENGTH = 8
ROWS_PER_RANK = 8
"""Fewest padded vocabulary rows per tp rank; all ranks together have at least `ROWS`, so that tokens differ."""
ROWS = 40
PADDING = 3
BUCKET_BYTES = 4096
"""Bucket size in bytes, so small that there are several buckets and some parameters cross their borders."""

MOST_PER_GROUP = 4
"""Largest number of layers that are recomputed together.

Groups of 3 suffice for stages of n and of n + 1 layers that both leave a remainder. With 4, both stages can also have more layers
than are offloaded, and one of them as many as are recomputed."""

Relation = tuple[object, ...]
"""Value returned by `stage_relations`."""


def shrink(config: Config) -> dict[str, dict[str, Any]]:
    """Compute the changes to a configuration, as sections with new values.

    All parallel sizes, the schedule and every relation in `launch/verify/relations.py` are kept. A null `parallel.dp` counts as 1.
    """
    kept, per_group, num_offloaded = _layers(config)
    layers = [layer for stage in kept for layer in stage]
    seq_length = _seq_length(config)
    batch = _batch(config, data_parallel_size(config.parallel, None) or 1)
    recompute: dict[str, Any] = {"num_layers": per_group}
    if (at_a_time := head_tokens(config)) is not None:
        wanted = head_pieces(config.train.micro_batch_size * config.model.seq_length, at_a_time)
        tokens = batch["micro_batch_size"] * seq_length
        recompute["head_tokens"] = next(n for n in range(tokens, 0, -1) if head_pieces(tokens, n) == wanted)
    changes: dict[str, dict[str, Any]] = {
        "model": {
            "num_layers": len(layers),
            "seq_length": seq_length,
            **_heads(config),
            **_vocabulary(config.model, config.parallel.tp),
            **shrink_attention(config.model, seq_length, _head_dim(config) if config.model.mla is None else ROTATED),
            **kinds_of(config, layers),
        },
        "train": batch,
        "optimizer": {"bucket_bytes": BUCKET_BYTES},
        "recompute": recompute,
        "offload": {"num_layers": num_offloaded, "min_bytes": 1},
    }
    fp8 = config.precision.fp8
    if fp8 is not None:
        # At least one layer keeps FP8 operands.
        rounded = [min(count, 1) for count in fp8.bf16_layers]
        changes["precision"] = {
            "fp8": fp8.model_dump() | {"bf16_layers": rounded if sum(rounded) < len(layers) else [0, 0]}
        }
    moe = config.model.moe
    if moe is not None:
        width = changes["model"]["ffn_hidden_size"]
        changes["model"]["moe"] = shrink_experts(moe, config.parallel.ep, width)
        changes["kernels"] = {"dispatch": dispatch_of(config)}
    if config.model.mtp is not None:
        # The first prediction layer reads the model's output; each further one reads the layer before it.
        mtp = config.model.mtp
        changes["model"]["mtp"] = mtp.model_dump() | {"num_layers": min(mtp.num_layers, 2)}
    # For the small sizes, auto could choose another method.
    changes["parallel"] = {"cp_method": method_of(config)} if config.parallel.cp > 1 else {}
    if config.parallel.layers_per_stage is not None:
        changes["parallel"]["layers_per_stage"] = [len(stage) for stage in kept]
    if is_root_of_width(config.model):
        changes["model"]["embedding_multiplier"] = math.sqrt(changes["model"]["hidden_size"])
    if config.optimizer.groups:
        model = ModelConfig.model_validate(config.model.model_dump(mode="json") | changes["model"])
        ahead = range(config.model.num_layers, config.model.num_layers + model.num_mtp_layers)
        changes["optimizer"]["groups"] = groups_of(config, model, [*layers, *ahead])
    return changes


def _block(config: Config) -> int | None:
    """Return how many numbers a block with one FP8 scale has.

    Every size must be a multiple of this number. None: scales do not belong to blocks, and any size is legal.
    """
    return None if config.precision.fp8 is None else BLOCKS.get(config.precision.fp8.recipe)


def _head_dim(config: Config) -> int:
    return _block(config) or HEAD_DIM


def _heads(config: Config) -> dict[str, Any]:
    model, tp = config.model, config.parallel.tp
    kv_heads, group = model.kv_heads, model.num_attention_heads // model.kv_heads
    if kv_heads < tp:
        # Key/value heads are replicated: every rank has one or two query heads.
        least = tp // kv_heads
        group = least * min(group // least, 2)
    else:
        kv_heads = tp * _kv_heads_of_a_rank(config, kv_heads // tp)
        group = min(group, 2)
    heads = kv_heads * group
    if model.mla is not None:
        heads = tp * min(model.num_attention_heads // tp, 2)
    filled = model.num_attention_heads * model.head_size
    head_dim, block = _head_dim(config), _block(config)
    width = heads * head_dim
    return {
        "hidden_size": width
        if model.hidden_size == filled
        else width * 2
        if model.hidden_size > filled
        else max(width // 2, block or 1),
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads if model.mla is None else None,
        "mla": _latents(model),
        "head_dim": None if model.head_dim is None else head_dim,
        "ffn_hidden_size": tp * (block or -(-10 // tp)) * (2 if tp == 1 else 1),
    }


def _latents(model: ModelConfig) -> dict[str, Any] | None:
    """Choose small sizes for the latents and for the parts of a head.

    Values are as wide as keys only if the same holds in `model`.
    """
    if model.mla is None:
        return None
    return {
        "q_lora_rank": None if model.mla.q_lora_rank is None else 10,
        "kv_lora_rank": 6,
        "qk_nope_head_dim": HEAD_DIM - ROTATED,
        "qk_rope_head_dim": ROTATED,
        "v_head_dim": HEAD_DIM if model.value_size == model.head_size else HEAD_DIM - 3,
    }


def _kv_heads_of_a_rank(config: Config, kv_heads: int) -> int:
    """Choose how many key/value heads a rank has in the small model.

    From the original `kv_heads` it has min(kv_heads, 2), or with ulysses cp * min(kv_heads / cp, 2). If keys are gathered in
    unequal pieces, it has the number of pieces + 1.
    """
    pieces = heads_of_pieces(kv_heads)
    if gathers_keys(config) and pieces[0] != pieces[-1]:
        return len(pieces) + 1
    unit = 1 if gathers_keys(config) else config.parallel.cp
    return unit * min(kv_heads // unit, 2)


def _vocabulary(model: ModelConfig, tp: int) -> dict[str, Any]:
    """Choose a small vocabulary with padding on the same ranks as before."""
    kinds = rows_of_ranks(model.vocab_size, model.padded_vocab_size, tp)
    per_rank = max(ROWS_PER_RANK, -(-ROWS // tp))
    partly = (per_rank - PADDING) * kinds.count("partly padding")
    return {"vocab_size": per_rank * kinds.count("whole") + partly, "vocab_multiple": tp * per_rank}


def _seq_length(config: Config) -> int:
    """Choose a sequence length with several tokens per rank.

    An odd length stays odd if cp is 1. It is a multiple of tp exactly if the original is.
    """
    length, tp, cp = config.model.seq_length, config.parallel.tp, config.parallel.cp
    least, block = max(LEAST_SEQ_LENGTH, 2 * tp), _block(config)
    if block is not None:
        least = length if length < block else math.lcm(block, tp) * (1 if cp == 1 else 2 * cp)
    if cp > 1:
        # Each part has as many whole blocks as before, and whole shards if sequence parallelism needs them.
        blocks = blocks_of_part(config)
        unit = cp * math.lcm(2 * (block or 1), blocks, tp if length // cp % tp == 0 else 1)
        return next(
            n
            for n in range(unit, 4 * (least + unit) * cp, unit)
            if n >= least and (n % tp == 0) == (length % tp == 0) and blocks_of_part(config, n) == blocks
        )
    kept = (length % 2, length % tp == 0)
    return next(n for n in range(least, least + 3 * tp + 2) if (n % 2, n % tp == 0) == kept)


def _layers(config: Config) -> tuple[list[list[int]], int, int]:
    """Choose (kept layer numbers per stage, layers per recomputed group, offloaded layers).

    The result has the fewest layers that leave `stage_relations` and `relations_of_stages` unchanged.
    """
    recomputed, counts = full_recompute_method(config), layer_counts(config)
    per_group, num_offloaded = config.recompute.num_layers, config.offload.num_layers
    sizes = sorted({count for count in counts if count})
    needed = needed_places(config)
    # A stage also has the places that smaller stages need.
    more = [sum(before <= place < size for place in needed) for before, size in pairwise([0, *sizes])]

    def related(size: int, group: int, offloaded: int) -> Relation:
        return stage_relations(size, recomputed=recomputed, layers_per_group=group, num_offloaded=offloaded)

    wanted = [related(size, per_group, num_offloaded) for size in sizes]
    best = (sizes, per_group, num_offloaded)
    for group in range(min(2, per_group), min(MOST_PER_GROUP, per_group) + 1):
        for offloaded in range(min(1, num_offloaded), min(num_offloaded, MOST_PER_GROUP * (len(sizes) + 2)) + 1):
            candidates = partial(related, group=group, offloaded=offloaded)
            most = 2 * group + offloaded + 2 + max(more)
            if config.parallel.layers_per_stage is None:
                smaller = _even_sizes(wanted, candidates, range(more[0], most + 1))
            else:
                smaller = _listed_sizes(wanted, candidates, more, most)
            if smaller is not None and sum(smaller) < sum(best[0]):
                best = (smaller, group, offloaded)
    return kept_layers(config, needed, sizes, best[0]), best[1], best[2]


def _even_sizes(
    wanted: Sequence[Relation], related: Callable[[int], Relation], candidates: Sequence[int]
) -> list[int] | None:
    """Find the smallest consecutive stage sizes, in layers, whose `related(size)` equals `wanted`.

    `related` gives `stage_relations` for a size. None: no candidate for the smallest size works.
    """
    for least in candidates:
        sizes = [least + place for place in range(len(wanted))]
        if [related(size) for size in sizes] == list(wanted):
            return sizes
    return None


def _listed_sizes(
    wanted: Sequence[Relation], related: Callable[[int], Relation], more: Sequence[int], most: int
) -> list[int] | None:
    """Find the smallest ascending stage sizes, in layers, whose `related(size)` equals `wanted`.

    Size i exceeds size i - 1 by at least `more[i]`, and by at least 1. `related` gives `stage_relations` for a size.
    For each size, `most` candidates are tried. None: for some size, no candidate fits.
    """
    sizes: list[int] = []
    for relation, least in zip(wanted, more, strict=True):
        first = (sizes[-1] if sizes else 0) + max(1, least)
        size = next((size for size in range(first, first + most) if related(size) == relation), None)
        if size is None:
            return None
        sizes.append(size)
    return sizes


def _batch(config: Config, dp: int) -> dict[str, Any]:
    """Choose batch sizes with at most 3 * pp microbatches, plus the original number modulo pp.

    With a schedule file, the number of microbatches stays as it is.
    """
    pp, microbatches = config.parallel.pp, num_microbatches(config)
    if microbatches > MOST_ROUNDS * pp and config.schedule.file is None:
        microbatches = MOST_ROUNDS * pp + microbatches % pp
    micro_batch_size = min(config.train.micro_batch_size, 2)
    return {"global_batch_size": microbatches * micro_batch_size * dp, "micro_batch_size": micro_batch_size}
