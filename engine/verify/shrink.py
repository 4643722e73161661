"""A configuration of the same kind, small enough for float64 on a laptop (no torch here).

Bugs of a layout come from relations between sizes, not from sizes: whether heads outnumber ranks, whether stages are even,
whether the vocabulary has padding, whether microbatches fill the pipeline. Each of them is kept; all else gets small.
"""

from typing import Any

from engine.config import Config, ModelConfig, ParallelConfig, data_parallel_size

HEAD_DIM = 8
LEAST_SEQ_LENGTH = 8
LEAST_VOCAB_MULTIPLE = 8
BUCKET_BYTES = 4096
"""Several buckets, with parameters across their borders."""


def shrink(config: Config) -> dict[str, dict[str, Any]]:
    """What to change in a configuration, as sections of new values; `parallel.dp` left open counts as 1.

    Kept: tp, pp, vpp, dp and the schedule; kv heads below tp or a multiple of it; grouped, multi-query or plain heads; hidden
    size equal to heads x head size or not; even or uneven stages, in their order; a padded vocabulary or an exact one;
    microbatches modulo pp, and whether they are fewer than stages; the part of a microbatch whose logits exist at a time.
    """
    parallel = config.parallel
    model, most_layers = _model(config.model, parallel)
    batch = _batch(config, data_parallel_size(parallel, None) or 1)
    recompute: dict[str, Any] = {"num_layers": min(config.recompute.num_layers, most_layers)}
    if config.recompute.head_tokens is not None:
        before = config.train.micro_batch_size * config.model.seq_length
        tokens = batch["micro_batch_size"] * model["seq_length"]
        recompute["head_tokens"] = max(1, min(config.recompute.head_tokens, before) * tokens // before)
    changes: dict[str, dict[str, Any]] = {
        "model": model,
        "train": batch,
        "optimizer": {"bucket_bytes": BUCKET_BYTES},
        "recompute": recompute,
        # Small tensors are moved as large ones are.
        "offload": {"num_layers": min(config.offload.num_layers, most_layers), "min_bytes": 1},
    }
    if parallel.layers_per_stage is not None:
        changes["parallel"] = {"layers_per_stage": _ranked(parallel.layers_per_stage)}
    return changes


def _model(model: ModelConfig, parallel: ParallelConfig) -> tuple[dict[str, Any], int]:
    """(new sizes, most layers of a stage)."""
    tp, num_stages = parallel.tp, parallel.pp * parallel.vpp
    kv_heads, group = model.kv_heads, model.num_attention_heads // model.kv_heads
    if kv_heads < tp:
        # Replicated: every rank has a head of its own, or two.
        least = tp // kv_heads
        group = least * min(group // least, 2)
    else:
        kv_heads = tp * min(kv_heads // tp, 2)
        group = min(group, 2)
    heads = kv_heads * group
    is_square = model.hidden_size == model.num_attention_heads * model.head_size
    if parallel.layers_per_stage is not None:
        counts = _ranked(parallel.layers_per_stage)
        num_layers, most = sum(counts), max(counts)
    else:
        rest = model.num_layers % num_stages
        per_stage = 1 if rest else min(model.num_layers // num_stages, 2)
        num_layers, most = num_stages * per_stage + rest, per_stage + bool(rest)
    multiple = tp * -(-LEAST_VOCAB_MULTIPLE // tp)
    is_padded = model.padded_vocab_size != model.vocab_size
    return {
        "num_layers": num_layers,
        "hidden_size": heads * HEAD_DIM * (1 if is_square else 2),
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "ffn_hidden_size": tp * -(-10 // tp) * (2 if tp == 1 else 1),
        "seq_length": tp * -(-LEAST_SEQ_LENGTH // tp),
        "vocab_size": 5 * multiple - (3 if is_padded else 0),
        "vocab_multiple": multiple,
    }, most


def _batch(config: Config, dp: int) -> dict[str, Any]:
    """At least one round of the pipeline, and as far from a whole number of rounds as before."""
    train, pp = config.train, config.parallel.pp
    num_microbatches = max(1, train.global_batch_size // (train.micro_batch_size * dp))
    if num_microbatches > 2 * pp:
        num_microbatches = 2 * pp + num_microbatches % pp
    micro_batch_size = min(train.micro_batch_size, 2)
    return {"global_batch_size": num_microbatches * micro_batch_size * dp, "micro_batch_size": micro_batch_size}


def _ranked(counts: list[int]) -> list[int]:
    """0 stays, and the others become 1, 2, ... in the order of their sizes."""
    sizes = sorted({count for count in counts if count})
    return [sizes.index(count) + 1 if count else 0 for count in counts]
