"""The rules about numbers: what must be a multiple of what, and limits that depend on other fields."""

from collections.abc import Callable
from typing import Any

from triaxis.engine.config.quantities.context_parallel import local_kv_heads
from triaxis.engine.config.quantities.fp8_layers import fp8_kinds, fp8_multiple
from triaxis.engine.config.quantities.plan import layers_of_the_largest_chunk, planned_steps, planned_tokens
from triaxis.engine.config.rules.rows import Division, Limit
from triaxis.engine.config.schema.model import BYTES_VOCABULARY
from triaxis.engine.config.schema.training import OptimizerConfig
from triaxis.engine.config.values.optimizer_kinds import MOMENTS, OPTIMIZERS, StateKind

LARGEST_BETA_IN_BF16 = 0.99
"""Largest beta for a bf16 moment. With 8 significant bits, a moment stops moving once it is within a share 2^-9 / (1 - beta) of the
mean that it tracks: 20 % at this beta."""


def _deals_out_tokens(config: Any) -> bool:
    """Whether tensor-parallel ranks share out the tokens of a sample."""
    return config.parallel.tp > 1 and (config.parallel.sequence_parallel or config.model.moe is not None)


SEQUENCE_OVER_RANKS = (
    Division(
        "model.seq_length",
        size=lambda c: c.model.seq_length,
        by=lambda c: 2 * c.parallel.cp if c.parallel.cp > 1 else 0,
        rule="must be a multiple of 2 x parallel.cp = {by}: each context-parallel rank holds equally many tokens of every "
        "sample, in blocks of early and of late ones, and some would belong to none",
        multiples=("model.seq_length",),
        divisors=("parallel.cp",),
    ),
    Division(
        "model.seq_length",
        size=lambda c: c.model.seq_length,
        by=lambda c: c.parallel.cp * c.parallel.tp if _deals_out_tokens(c) else 0,
        rule="must be a multiple of parallel.cp x parallel.tp = {by}: sequence_parallel, and layers with experts, deal the "
        "tokens out over these ranks, and the last ones would belong to none",
        multiples=("model.seq_length",),
        divisors=("parallel.tp",),
        others={"parallel.sequence_parallel": [False]},
    ),
)
"""What must divide the tokens of a sample."""


def _fp8(
    key: str, size: Callable[[Any], int], what: str, ranks: Callable[[Any], int] = lambda c: 1, *, counts: bool = False
) -> Division:
    """Return the rule about one side of the matrices in FP8 GEMMs.

    Args:
        key: dotted name of the field that decides the side.
        size: computes the length of the side, before it is cut over ranks; 0 if there is no such side.
        what: noun phrase for the part of it on one rank.
        ranks: computes the number of ranks that the side is cut over.
        counts: whether the field counts heads or experts, each of which is many numbers.
    """
    return Division(
        key,
        size=size,
        by=fp8_multiple,
        ranks=ranks,
        rule=f"makes {{part}} {what}, and precision.fp8.recipe = {{c.precision.fp8.recipe}} takes multiples of {{by}}: an FP8 "
        "GEMM has whole tiles, or whole blocks with a scale each",
        multiples=() if counts else (key,),
        divisors=("parallel.tp",),
        numbers=(key,) if counts else (),
    )


def _tp(config: Any) -> int:
    return int(config.parallel.tp)


GPT_SHAPES = (
    Division(
        "model.hidden_size",
        size=lambda c: c.model.hidden_size,
        by=lambda c: 0 if c.model.mla is not None or c.model.head_dim is not None else c.model.num_attention_heads,
        rule="must be a multiple of num_attention_heads = {by} where head_dim is not given: the heads would not fill the width",
        multiples=("model.hidden_size",),
        divisors=("model.num_attention_heads",),
        advice="Or give model.head_dim.",
    ),
    Division(
        "model.num_kv_heads",
        size=lambda c: c.model.num_attention_heads,
        by=lambda c: c.model.kv_heads,
        rule="must divide num_attention_heads = {size}: every key/value head serves the same number of query heads, and some "
        "query heads would have none",
        divisors=("model.num_kv_heads",),
    ),
    Division(
        "model.num_attention_heads",
        size=lambda c: c.model.num_attention_heads,
        by=_tp,
        rule="must be a multiple of parallel.tp = {by}: a tensor-parallel rank computes whole heads, and they could not be dealt "
        "out evenly",
        multiples=("model.num_attention_heads",),
        divisors=("parallel.tp",),
    ),
    Division(
        "model.num_kv_heads",
        size=lambda c: c.model.kv_heads,
        by=lambda c: c.parallel.tp if c.model.num_kv_heads is not None and c.parallel.tp % c.model.kv_heads else 0,
        rule="must be a multiple of parallel.tp = {by}, or divide it: each rank holds whole key/value heads, or tp / "
        "num_kv_heads neighbours hold replicas of one; here some rank would need parts of two",
        numbers=("model.num_kv_heads", "parallel.tp"),
    ),
    Division(
        "model.ffn_hidden_size",
        size=lambda c: c.model.ffn_size,
        by=_tp,
        rule="must be a multiple of parallel.tp = {by}: the MLP is cut by columns, and the last ones would belong to no rank",
        multiples=("model.ffn_hidden_size",),
        divisors=("parallel.tp",),
    ),
    Division(
        "model.vocab_multiple",
        size=lambda c: c.model.padded_vocab_size,
        by=_tp,
        rule="pads vocab_size = {c.model.vocab_size} to {size}, which must be a multiple of parallel.tp = {by}: the last rows of "
        "the embedding would belong to no rank",
        multiples=("model.vocab_multiple",),
        divisors=("parallel.tp",),
    ),
    *SEQUENCE_OVER_RANKS,
)
"""What holds for a GPT in any software that cuts one in this way."""

# A cp rank has one part from the sequence's front and one from its back; a block holds neighbouring tokens.
TOKENS_IN_FP8 = _fp8(
    "model.seq_length",
    lambda c: c.train.micro_batch_size * c.model.seq_length,
    "tokens of a microbatch in each part of the sequence that a rank has",
    lambda c: 2 * c.parallel.cp if c.parallel.cp > 1 else 1,
)

DIVISIONS = (
    *GPT_SHAPES,
    Division(
        "model.head_dim",
        size=lambda c: c.model.head_size,
        by=lambda c: 2 if c.model.mla is None and c.model.position_kind.is_rotary and c.model.heads_have_a_size else 0,
        rule="must be even with position = rope: RoPE turns pairs of elements, and one would be left over",
        multiples=("model.head_dim",),
        numbers=("model.num_attention_heads",),
        others={"model.position": ["learned"]},
    ),
    Division(
        "model.mla.qk_rope_head_dim",
        size=lambda c: c.model.mla.qk_rope_head_dim,
        by=lambda c: 2 if any(kind.rotary for kind in c.model.kinds) else 0,
        rule="must be even: RoPE turns pairs of elements, and one would be left over",
        multiples=("model.mla.qk_rope_head_dim",),
    ),
    Division(
        "parallel.cp_method",
        size=lambda c: local_kv_heads(c),
        by=lambda c: c.parallel.cp if c.parallel.cp_method == "ulysses" else 0,
        rule="gives each of parallel.cp = {by} ranks whole rows of equally many heads, but a tensor-parallel rank has {size} of "
        "the {c.model.kv_heads} key/value heads: some ranks would have none, or a part of one",
        others={"parallel.cp_method": ["all_gather"]},
        divisors=("parallel.cp",),
    ),
    Division(
        "model.moe.groups",
        size=lambda c: c.model.moe.num_experts,
        by=lambda c: c.model.moe.groups,
        rule="must divide num_experts = {size}: groups have equally many experts",
        divisors=("model.moe.groups",),
    ),
    Division(
        "parallel.ep",
        size=lambda c: c.model.moe.num_experts,
        by=lambda c: 0 if c.model.moe is None else c.parallel.ep,
        rule="must divide model.moe.num_experts = {size}: each rank holds equally many experts",
        divisors=("parallel.ep",),
    ),
    Division(
        "model.moe.ffn_hidden_size",
        size=lambda c: c.model.moe.ffn_hidden_size,
        by=lambda c: c.parallel.etp if c.parallel.etp in (1, c.parallel.tp) else 0,
        rule="must be a multiple of parallel.etp = {by}: the last columns of an expert would belong to no rank",
        multiples=("model.moe.ffn_hidden_size",),
        divisors=("parallel.etp",),
    ),
    Division(
        "model.moe.shared_experts",
        size=lambda c: c.model.moe.shared_size,
        by=_tp,
        rule="makes an MLP of width {size}, which must be a multiple of parallel.tp = {by}: its last columns would belong to no "
        "rank",
        multiples=("model.moe.shared_experts",),
    ),
    Division(
        "checkpoint.keep_every",
        size=lambda c: c.checkpoint.keep_every or 0,
        by=lambda c: c.checkpoint.every,
        rule="must be a multiple of checkpoint.interval = {by}: other steps are never saved, so none of them would be kept",
        multiples=("checkpoint.keep_every",),
    ),
    _fp8("model.hidden_size", lambda c: c.model.hidden_size, "numbers per token"),
    _fp8(
        "model.num_attention_heads",
        lambda c: c.model.num_attention_heads * c.model.head_size,
        "numbers of a token's heads on a rank that are queries",
        _tp,
        counts=True,
    ),
    _fp8(
        "model.num_attention_heads",
        lambda c: 0 if c.model.mla is None else c.model.num_attention_heads * c.model.value_size,
        "numbers of a token's heads on a rank that attention returns",
        _tp,
        counts=True,
    ),
    # With fewer heads than ranks, each rank has one whole head.
    _fp8(
        "model.num_kv_heads",
        lambda c: (c.model.num_kv_heads or 0) * c.model.head_size,
        "numbers of a token's heads on a rank that are keys",
        lambda c: min(c.parallel.tp, c.model.kv_heads),
        counts=True,
    ),
    _fp8("model.mla.q_lora_rank", lambda c: c.model.mla.q_lora_rank or 0, "numbers of a latent"),
    _fp8("model.mla.kv_lora_rank", lambda c: c.model.mla.kv_lora_rank, "numbers of a latent"),
    _fp8("model.mla.qk_rope_head_dim", lambda c: c.model.mla.qk_rope_head_dim, "numbers of a rotated key"),
    _fp8(
        "model.ffn_hidden_size",
        lambda c: 0 if all(kind.has_experts for kind in fp8_kinds(c)) else c.model.ffn_size,
        "numbers of the MLP's inner width on a rank",
        _tp,
    ),
    _fp8(
        "model.moe.shared_experts",
        lambda c: c.model.moe.shared_size if any(kind.has_experts for kind in fp8_kinds(c)) else 0,
        "numbers of their inner width on a rank",
        _tp,
        counts=True,
    ),
    TOKENS_IN_FP8,
)
"""What must be a multiple of what."""


def _tokens_after_the_warmup(config: Any) -> int | None:
    """Count the run's tokens after the warm-up if a cooldown may follow it; None if none may, or if the run's length is unknown."""
    optimizer, num_tokens = config.optimizer, planned_tokens(config)
    if num_tokens is None or optimizer.lr_schedule not in ("wsd", "inverse_sqrt"):
        return None
    warmup = (
        optimizer.warmup_tokens or optimizer.warmup_steps * config.train.global_batch_size * config.model.seq_length
    )
    return max(0, num_tokens - warmup)


def _decay(moment: StateKind, decay: str) -> Limit:
    """Return the rule about an optimizer's decay rate `decay` if its moment is kept in bf16."""
    return Limit(
        f"optimizer.{decay}",
        limit=lambda c: (
            LARGEST_BETA_IN_BF16
            if c.precision.moments == "bf16" and moment in OPTIMIZERS[c.optimizer.name].moments
            else None
        ),
        rule="must be at most {limit} with precision.moments = bf16: a step changes the moment by less than half of its last bit "
        "unless it is far off, so it would stand still",
        others={"precision.moments": ["full"]},
    )


LIMITS = (
    Limit(
        "model.vocab_size",
        limit=lambda c: BYTES_VOCABULARY if c.data.tokenizer == "bytes" and not c.data.synthetic else None,
        is_least=True,
        rule="must be at least {limit} with data.tokenizer = bytes (256 bytes and the end of a document): larger ids would have "
        "no embedding",
    ),
    Limit(
        "model.mla.v_head_dim",
        limit=lambda c: c.model.mla.qk_head_dim,
        to="model.mla.qk_nope_head_dim",
        rule="must be at most the {limit} elements of a query: fused kernels have one size of heads, to which values are padded",
    ),
    Limit(
        "model.moe.top_groups",
        limit=lambda c: c.model.moe.groups,
        rule="must be at most groups = {limit}: a token cannot use more groups than there are",
    ),
    Limit(
        "model.moe.top_k",
        limit=lambda c: min(c.model.moe.top_groups, c.model.moe.groups) * c.model.moe.experts_in_group or None,
        rule="must be at most {limit}, the experts that a token may choose from: some choices would be of no expert",
    ),
    Limit(
        "model.seq_length",
        limit=lambda c: None if c.model.mtp is None else c.model.mtp.num_layers + 1,
        is_least=True,
        rule="must be at least {limit}, above model.mtp.num_layers = {c.model.mtp.num_layers}: no token of a sample would have "
        "another so far ahead",
    ),
    Limit(
        "parallel.tp",
        limit=lambda c: None if c.precision.fp8 is None or c.model.mla is not None else c.model.kv_heads,
        rule="must be at most model.num_kv_heads = {limit} with precision.fp8: gradients of a head's keys and values that "
        "several ranks hold would be rounded in parts, unlike in other layouts",
        others={"precision.fp8": [None]},
    ),
    Limit(
        "parallel.zero",
        limit=lambda c: None if c.precision.fp8 is None else 2,
        rule="must be at most {limit} with precision.fp8: every rank keeps FP8 copies of all its weights, 2 bytes each, so "
        "cutting the weights would save nothing",
        others={"precision.fp8": [None]},
    ),
    Limit(
        "optimizer.warmup_steps",
        limit=planned_steps,
        to="train.steps",
        rule="must be at most the {limit} steps of the run: it would end before the learning rate reaches its peak",
    ),
    Limit(
        "optimizer.warmup_tokens",
        limit=planned_tokens,
        rule="must be at most the {limit:,} tokens of the run: it would end before the learning rate reaches its peak",
    ),
    Limit(
        "optimizer.decay_steps",
        limit=lambda c: c.optimizer.warmup_steps + 1,
        is_least=True,
        rule="must be more than warmup_steps = {c.optimizer.warmup_steps}: the decay would end before it begins",
    ),
    Limit(
        "optimizer.cooldown_tokens",
        limit=_tokens_after_the_warmup,
        rule="must be at most {limit:,}, the tokens of the run behind the warm-up: the fall would begin before the learning rate "
        "reaches its peak",
    ),
    Limit(
        "optimizer.min_lr",
        limit=lambda c: c.optimizer.lr,
        to="optimizer.lr",
        rule="must be at most lr = {limit}: the learning rate would rise at the end",
    ),
    Limit(
        "optimizer.bucket_bytes",
        limit=lambda c: 8 if c.precision.dtype == "float64" else 4,
        is_least=True,
        rule="must hold at least one main grad of {limit} bytes: no bucket would ever fill",
        others={"optimizer.bucket_bytes": [OptimizerConfig.model_fields["bucket_bytes"].default]},
    ),
    *(_decay(name, moment.decay) for name, moment in MOMENTS.items()),
    Limit(
        "precision.loss_scale.initial",
        limit=lambda c: c.precision.loss_scale.minimum if c.precision.loss_scale.static is None else None,
        is_least=True,
        to="precision.loss_scale.minimum",
        rule="must be at least precision.loss_scale.minimum = {limit}: the first overflow would raise it",
    ),
    Limit(
        "recompute.num_layers",
        limit=lambda c: layers_of_the_largest_chunk(c) if c.recompute.granularity == "full" else None,
        rule="must be at most {limit}, the layers of the largest model chunk: there are no more to recompute",
    ),
    Limit(
        "offload.num_layers",
        limit=lambda c: layers_of_the_largest_chunk(c) if c.offload.num_layers else None,
        rule="must be at most {limit}, the layers of the largest model chunk: there are no more to offload",
    ),
)
"""Limits that depend on other fields."""
