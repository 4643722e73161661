"""The rules of the model: what its shapes must keep with each other, and with the tensor-parallel size (no torch here).

See `engine/config/rules.py` for what a rule is.
"""

from collections.abc import Iterator

from engine.config.problems import Problem, Rule, Subject, divisors, multiples

BYTES_VOCABULARY = 257
"""Ids of the bytes tokenizer: 256 bytes and the end of a document."""


LARGEST_BETA_IN_BF16 = 0.99
"""A moment of 8 bits stands still within 2^-9 / (1 - beta) of what it averages: here 20 %."""


def heads_fill_hidden(subject: Subject) -> Iterator[Problem]:
    model = subject.config.model
    if model.head_dim is None and model.hidden_size % model.num_attention_heads:
        yield Problem(
            "model.hidden_size",
            model.hidden_size,
            f"must be a multiple of num_attention_heads = {model.num_attention_heads} where head_dim is not given: the heads "
            f"would not fill the width",
            {
                "model.hidden_size": multiples(model.num_attention_heads, model.hidden_size),
                "model.num_attention_heads": divisors(model.hidden_size, model.num_attention_heads),
            },
            "Or give model.head_dim.",
        )


def rope_pairs(subject: Subject) -> Iterator[Problem]:
    model = subject.config.model
    fills = model.head_dim is not None or model.hidden_size % model.num_attention_heads == 0
    if model.position_kind.is_rotary and fills and model.head_size % 2:
        yield Problem(
            "model.head_dim",
            model.head_size,
            "must be even with position = rope: RoPE turns pairs of elements, and one would be left over",
            {
                "model.head_dim": multiples(2, model.head_size),
                "model.num_attention_heads": divisors(model.hidden_size, model.num_attention_heads),
                "model.position": ["learned"],
            },
        )


def queries_share_keys(subject: Subject) -> Iterator[Problem]:
    model = subject.config.model
    if model.num_attention_heads % model.kv_heads:
        yield Problem(
            "model.num_kv_heads",
            model.kv_heads,
            f"must divide num_attention_heads = {model.num_attention_heads}: every key/value head serves the same number of "
            f"query heads, and some query heads would have none",
            {"model.num_kv_heads": divisors(model.num_attention_heads, model.kv_heads)},
        )


def heads_over_tp(subject: Subject) -> Iterator[Problem]:
    model, tp = subject.config.model, subject.config.parallel.tp
    if model.num_attention_heads % tp:
        yield Problem(
            "model.num_attention_heads",
            model.num_attention_heads,
            f"must be a multiple of parallel.tp = {tp}: a tensor-parallel rank computes whole heads, and they could not be "
            f"dealt out evenly",
            {
                "model.num_attention_heads": multiples(tp, model.num_attention_heads),
                "parallel.tp": divisors(model.num_attention_heads, tp),
            },
        )


def kv_heads_over_tp(subject: Subject) -> Iterator[Problem]:
    model, tp = subject.config.model, subject.config.parallel.tp
    if model.num_kv_heads is not None and model.kv_heads % tp and tp % model.kv_heads:
        yield Problem(
            "model.num_kv_heads",
            model.kv_heads,
            f"must be a multiple of parallel.tp = {tp}, or divide it: each rank holds whole key/value heads, or tp / "
            f"num_kv_heads neighbours hold replicas of one; here some rank would need parts of two",
            {
                "model.num_kv_heads": divisors(model.num_attention_heads, model.kv_heads),
                "parallel.tp": divisors(model.num_attention_heads, tp),
            },
        )


def ffn_over_tp(subject: Subject) -> Iterator[Problem]:
    model, tp = subject.config.model, subject.config.parallel.tp
    if model.ffn_size % tp:
        yield Problem(
            "model.ffn_hidden_size",
            model.ffn_size,
            f"must be a multiple of parallel.tp = {tp}: the MLP is cut by columns, and the last ones would belong to no rank",
            {"model.ffn_hidden_size": multiples(tp, model.ffn_size), "parallel.tp": divisors(model.ffn_size, tp)},
        )


def vocabulary_over_tp(subject: Subject) -> Iterator[Problem]:
    model, tp = subject.config.model, subject.config.parallel.tp
    if model.padded_vocab_size % tp:
        yield Problem(
            "model.vocab_multiple",
            model.vocab_multiple,
            f"pads vocab_size = {model.vocab_size} to {model.padded_vocab_size}, which must be a multiple of parallel.tp = "
            f"{tp}: the last rows of the embedding would belong to no rank",
            {
                "model.vocab_multiple": multiples(tp, model.vocab_multiple),
                "parallel.tp": divisors(model.padded_vocab_size, tp),
            },
        )


def sequence_over_tp(subject: Subject) -> Iterator[Problem]:
    model, parallel = subject.config.model, subject.config.parallel
    if parallel.sequence_parallel and model.seq_length % parallel.tp:
        yield Problem(
            "model.seq_length",
            model.seq_length,
            f"must be a multiple of parallel.tp = {parallel.tp} with sequence_parallel: each rank holds an equal part of the "
            f"sequence, and the last tokens would belong to none",
            {
                "model.seq_length": multiples(parallel.tp, model.seq_length),
                "parallel.tp": divisors(model.seq_length, parallel.tp),
                "parallel.sequence_parallel": [False],
            },
        )


def vocabulary_holds_tokens(subject: Subject) -> Iterator[Problem]:
    model, data = subject.config.model, subject.config.data
    if data.tokenizer == "bytes" and not data.synthetic and model.vocab_size < BYTES_VOCABULARY:
        yield Problem(
            "model.vocab_size",
            model.vocab_size,
            f"must be at least {BYTES_VOCABULARY} with data.tokenizer = bytes (256 bytes and the end of a document): larger ids "
            f"would have no embedding",
            {"model.vocab_size": [BYTES_VOCABULARY]},
        )


def dropout_on_probabilities(subject: Subject) -> Iterator[Problem]:
    dropout, kernel = subject.config.model.attention_dropout, subject.config.kernels.attention
    if dropout > 0 and kernel != "explicit":
        yield Problem(
            "model.attention_dropout",
            dropout,
            "needs kernels.attention = explicit: the fused kernel draws masks of its own, which depend on the layout and "
            "cannot be replayed",
            {"kernels.attention": ["explicit"], "model.attention_dropout": [0.0]},
        )


def narrow_state_fits(subject: Subject) -> Iterator[Problem]:
    precision, optimizer = subject.config.precision, subject.config.optimizer
    for key, value in (("masters", "split"), ("moments", "bf16"), ("gradients", "bf16")):
        if getattr(precision, key) == value and precision.dtype != "bf16":
            yield Problem(
                f"precision.{key}",
                value,
                f"is for weights in bf16, but precision.dtype = {precision.dtype}: there gradients and optimizer state are as "
                "exact as the weights",
                {f"precision.{key}": ["full"], "precision.dtype": ["bf16"]},
            )
    if precision.moments == "bf16":
        for key in ("beta1", "beta2"):
            beta = getattr(optimizer, key)
            if beta > LARGEST_BETA_IN_BF16:
                yield Problem(
                    f"optimizer.{key}",
                    beta,
                    f"must be at most {LARGEST_BETA_IN_BF16} with precision.moments = bf16: a step changes the moment by less than "
                    "half of its last bit unless it is far off, so it would stand still",
                    {f"optimizer.{key}": [LARGEST_BETA_IN_BF16], "precision.moments": ["full"]},
                )


MODEL_RULES: tuple[Rule, ...] = (
    heads_fill_hidden,
    rope_pairs,
    queries_share_keys,
    heads_over_tp,
    kv_heads_over_tp,
    ffn_over_tp,
    vocabulary_over_tp,
    sequence_over_tp,
    vocabulary_holds_tokens,
    dropout_on_probabilities,
    narrow_state_fits,
)
