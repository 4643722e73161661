"""Evaluate the relations between model and layout that can decide whether a layout bug shows.

An example is whether a tp rank has only padding rows. When `launch/verify/shrink.py` shrinks a model, it leaves the value of every
relation unchanged.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from triaxis.engine.config.quantities.context_parallel import gathers_keys, heads_of_pieces, local_kv_heads, method_of
from triaxis.engine.config.quantities.expert_rows import dispatch_of
from triaxis.engine.config.quantities.head_pieces import head_tokens
from triaxis.engine.config.quantities.plan import data_parallel_size, stages_of
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.context_parallel.deal import block_length
from triaxis.engine.layout.shard_spec import cut
from triaxis.launch.verify.shrink_experts import relations_of_experts
from triaxis.launch.verify.shrink_layers import relations_of_stages

MOST_ROUNDS = 3
"""Largest number of pipeline rounds that is kept: a first, a middle and a last one; further rounds are like the middle one."""

MOST_PIECES = 3
"""Largest number of pieces, at the output head, that is kept for a microbatch, for the same reason."""


def relations(config: Config) -> dict[str, object]:
    """Evaluate every relation between model and layout, by name. A null `parallel.dp` counts as 1."""
    return {name: value(config) for name, value in RELATIONS.items()}


def rows_of_ranks(vocab_size: int, padded_size: int, tp: int) -> tuple[str, ...]:
    """Classify each tp rank's vocabulary rows as `whole`, `partly padding` or `all padding`."""
    kinds = []
    for index in range(tp):
        start, stop = cut(padded_size, tp, index)
        kinds.append("whole" if stop <= vocab_size else "all padding" if start >= vocab_size else "partly padding")
    return tuple(kinds)


def stage_relations(
    num_layers: int, *, recomputed: str, layers_per_group: int, num_offloaded: int
) -> tuple[object, ...]:
    """Relate one stage's layers to recomputed groups and to offloaded layers.

    The result describes (layer count, uniform groups, block, offloaded groups). Stages with equal results meet the same cases, such
    as a shorter last group.

    Args:
        recomputed: `uniform` or `block` if whole layers are recomputed, else "".
        layers_per_group: value of `recompute.num_layers`.
        num_offloaded: value of `offload.num_layers`.
    """
    size = layers_per_group if recomputed == "uniform" else 1
    groups = -(-num_layers // size)
    moved = -(-min(num_offloaded, num_layers) // size)
    return (
        min(num_layers, 2),
        # uniform: a whole group, several groups, a shorter last group
        (num_layers >= size, groups > 1, num_layers % size > 0),
        _sign(num_layers - layers_per_group) if recomputed == "block" else None,
        # offloaded: no group, one, two (each in its own buffer) or more; the whole stage; a border inside a group
        (min(moved, 3), moved == groups, num_offloaded % size > 0),
    )


def full_recompute_method(config: Config) -> str:
    """Return the method that recomputes whole layers, `uniform` or `block`.

    The result is "" if whole layers are not recomputed.
    """
    return config.recompute.method if config.recompute.granularity == "full" else ""


def layer_counts(config: Config) -> list[int]:
    """Count each stage's layers, in stage order, without multi-token prediction layers."""
    return [stage.num_own for stage in stages_of(config)]


def num_microbatches(config: Config) -> int:
    """Count one pipeline's microbatches per step."""
    dp = data_parallel_size(config.parallel, None) or 1
    return max(1, config.train.global_batch_size // (config.train.micro_batch_size * dp))


def blocks_of_part(config: Config, seq_length: int | None = None) -> int:
    """Count the blocks that a context-parallel rank holds of one sample.

    The result is 1 unless context parallelism gathers keys (method all_gather).

    Args:
        config: the run's configuration.
        seq_length: length to use instead of the model's.
    """
    cp, length = config.parallel.cp, seq_length or config.model.seq_length
    if not gathers_keys(config):
        return 1
    num_documents = 2 if config.data.attention == "within" else 1
    return length // cp // block_length(length, cp, num_documents)


def _pieces_of_heads(config: Config) -> tuple[bool, bool] | None:
    """Whether keys and values are gathered in several pieces, and whether the pieces differ in size.

    None: keys are not gathered, or the model has latent attention (MLA).
    """
    if not gathers_keys(config) or config.model.mla is not None:
        return None
    pieces = heads_of_pieces(local_kv_heads(config))
    return len(pieces) > 1, pieces[0] != pieces[-1]


def head_pieces(num_tokens: int, tokens_at_a_time: int | None) -> tuple[int, bool] | None:
    """Count the pieces that the output head cuts a microbatch into, up to `MOST_PIECES`.

    Returns:
        (number of pieces, whether the last piece is smaller than the others). A microbatch that fits into one piece
        gives (1, False). None if `tokens_at_a_time` is None.
    """
    if tokens_at_a_time is None:
        return None
    return min(-(-num_tokens // tokens_at_a_time), MOST_PIECES), num_tokens > tokens_at_a_time and bool(
        num_tokens % tokens_at_a_time
    )


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def _order_of_stages(config: Config) -> list[list[int]]:
    counts = layer_counts(config)
    return [[_sign(one - other) for other in counts] for one in counts]


def _layers_of_stages(config: Config) -> list[tuple[object, ...]]:
    return [
        stage_relations(
            count,
            recomputed=full_recompute_method(config),
            layers_per_group=config.recompute.num_layers,
            num_offloaded=config.offload.num_layers,
        )
        for count in layer_counts(config)
    ]


def _kinds_of_layers(config: Config) -> list[tuple[object, ...]]:
    """List each layer kind's (has window shorter than samples, has sinks, has experts, kind of RoPE, RoPE scaling)."""
    length = config.model.seq_length
    return [
        (
            kind.window is not None and kind.window < length,
            kind.sinks,
            kind.has_experts,
            kind.rotary and (kind.rotary.dim < config.model.head_size, kind.rotary.is_long),
            kind.rotary and kind.rotary.scaling and kind.rotary.scaling.type,
        )
        for kind in dict.fromkeys(config.model.kinds)
    ]


def _experts(config: Config) -> tuple[object, ...] | None:
    moe, ep = config.model.moe, config.parallel.ep
    return None if moe is None else (dispatch_of(config), *relations_of_experts(moe, ep))


def is_root_of_width(model: ModelConfig) -> bool:
    """Whether the embedding is multiplied by the hidden size's square root (Gemma)."""
    return model.embedding_multiplier == math.sqrt(model.hidden_size)


def _query_heads_of_a_rank(config: Config) -> tuple[bool, bool]:
    model, tp = config.model, config.parallel.tp
    on_rank, keys_on_rank = model.num_attention_heads // tp, max(1, model.kv_heads // tp)
    return on_rank > 1, on_rank > keys_on_rank


RELATIONS: Mapping[str, Callable[[Config], object]] = MappingProxyType(
    {
        "ranks that share a key/value head": lambda c: max(1, c.parallel.tp // c.model.kv_heads),
        "several key/value heads on a rank": lambda c: c.model.kv_heads > c.parallel.tp,
        "query heads share a key/value head": lambda c: c.model.num_attention_heads > c.model.kv_heads,
        "several query heads on a rank, and for a key/value head there": _query_heads_of_a_rank,
        "head_dim is given": lambda c: c.model.head_dim is not None,
        "width against heads x head size": lambda c: _sign(
            c.model.hidden_size - c.model.num_attention_heads * c.model.head_size
        ),
        "rows of the vocabulary on each tp rank": lambda c: rows_of_ranks(
            c.model.vocab_size, c.model.padded_vocab_size, c.parallel.tp
        ),
        "sequence divides by tp": lambda c: c.model.seq_length % c.parallel.tp == 0,
        "blocks of a context-parallel part": blocks_of_part,
        "how attention reaches other parts": lambda c: method_of(c) if c.parallel.cp > 1 else "",
        "pieces of gathered heads": _pieces_of_heads,
        "pieces of a microbatch at the head": lambda c: head_pieces(
            c.train.micro_batch_size * c.model.seq_length, head_tokens(c)
        ),
        "order of stages by layers": _order_of_stages,
        "stages without layers": lambda c: [not count for count in layer_counts(c)],
        "recomputed and offloaded layers of each stage": _layers_of_stages,
        "several layers are recomputed together": lambda c: c.recompute.num_layers > 1,
        "kinds of layers": _kinds_of_layers,
        "kinds and parameter groups of each stage's layers": relations_of_stages,
        "latents of queries, and values smaller than keys": lambda c: (
            c.model.mla and (c.model.mla.q_lora_rank is None, c.model.value_size < c.model.head_size)
        ),
        "experts, choices, groups and their ranks": _experts,
        "room for the rows of experts": lambda c: c.model.moe and c.model.moe.row_headroom,
        "embedding is multiplied with the root of the width": lambda c: is_root_of_width(c.model),
        "microbatches modulo stages": lambda c: num_microbatches(c) % c.parallel.pp,
        "rounds of microbatches": lambda c: min(num_microbatches(c) // c.parallel.pp, MOST_ROUNDS),
        "several samples in a microbatch": lambda c: c.train.micro_batch_size > 1,
    }
)
