"""Tensors that an expert layer keeps in place of a dense MLP's, counted from the configuration alone.

A microbatch has b samples of s tokens, each h wide. It is divided over c context- and t tensor-parallel ranks, so a rank has
T = b s / (c t) tokens. Each token goes to k of E experts. A set of experts lies on e x etp ranks (e = ep), and the experts of one
rank get R rows. On a rank an expert is f = `ffn_hidden_size` / etp wide and has g f columns before its activation (g = 2 if the
activation is gated, else 1). Shared experts are f_s wide. An element has w bytes in the run's dtype, and a bytes in the
accumulation dtype. The parts of a layer keep, in bytes:

    router      tokens T h w; logits T E a; expert choice 8 T k; with a sequence loss, fractions b E a
    dispatch    indices of rows and of slots: all_gather 8 (R + e etp k T); all_to_all 16 (etp k T + R)
    experts     rows R h w; gate and up R g f w; activated values R f w; routing weights R a
    shared      gate and up, and activated values, of an MLP of width f_s; the router already keeps the input

If sequence parallelism is off, a rank copies its tokens out of the sequence, and the shared experts keep the whole sequence. A
recomputed layer keeps only the expert choice, its counts and the fractions. Not counted: 4 bytes per expert that mark where its
rows end.

The dispatch determines the number of rows R:

    all_gather     R is a buffer's size: `row_headroom` x etp k T, or the worst case e etp T min(k, E / e); routing never changes it
    all_to_all     R = `load` x etp k T; `load` is 1 if all experts get equally many rows, and e min(k, E / e) / k at worst
"""

from collections.abc import Mapping
from fractions import Fraction

from triaxis.engine.config.quantities.expert_rows import buffer_rows, dispatch_of, local_tokens, worst_rows
from triaxis.engine.config.schema.moe import MoEConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.models.predict.terms import INDEX_BYTES, Sizes, Term, column_input

BALANCED = Fraction(1)
"""Load of a rank whose experts get as many rows as any other rank's."""

NOTHING = Fraction(0)


def worst_load(config: Config, sizes: ParallelSizes) -> Fraction:
    """Compute the largest `load` that routing can give a rank: the rows of its experts over those under balanced routing."""
    moe, tokens = config.model.moe, local_tokens(config)
    assert moe is not None, "a model with experts says which"
    return Fraction(worst_rows(moe, tokens, sizes.ep, sizes.etp), sizes.etp * moe.top_k * tokens)


def rows_per_token(config: Config, sizes: ParallelSizes, load: Fraction = BALANCED) -> Fraction:
    """Compute the rows R that a rank's experts get, per token of the b s / c that the tensor-parallel ranks share."""
    moe, tokens = _moe(config), local_tokens(config)
    if dispatch_of(config) == "all_gather":
        rows = Fraction(buffer_rows(moe, tokens, sizes.ep, sizes.etp))
    else:
        rows = Fraction(round(min(load, worst_load(config, sizes)) * sizes.etp * moe.top_k * tokens))
    return rows / (tokens * sizes.tp)


def columns_per_token(config: Config, sizes: ParallelSizes, load: Fraction = BALANCED) -> Fraction:
    """Count the elements per token after the activation, in the rank's routed experts and its part of the shared ones."""
    moe = _moe(config)
    routed = rows_per_token(config, sizes, load) * moe.ffn_hidden_size / sizes.etp
    return routed + Fraction(moe.shared_size, sizes.tp)


def expert_terms(config: Config, at: Sizes, sizes: ParallelSizes, load: Fraction) -> list[Term]:
    """List the tensors kept between the norm before a layer's experts and the residual addition."""
    model, moe, t = config.model, _moe(config), sizes.tp
    part = "norm" if model.norms_before else ""
    rows = rows_per_token(config, sizes, load)
    inputs, f = model.activation_kind.num_inputs, Fraction(moe.ffn_hidden_size, sizes.etp)
    gate, name = ("gate and up", "mlp") if model.activation_kind.is_gated else ("activation input", "mlp")
    slots = Fraction(sizes.etp * moe.top_k, t)
    indices = rows + sizes.ep * slots if dispatch_of(config) == "all_gather" else 2 * (rows + slots)
    terms = [
        *_inputs(config, at, sizes, part),
        Term("mlp.router", "logits", NOTHING, Fraction(at.acc * moe.num_experts, t)),
        *choice_terms(config, at, sizes),
        Term("mlp.dispatch", "indices of rows and slots", NOTHING, INDEX_BYTES * indices, moves=False),
    ]
    if moe.shared_size:
        shared = Fraction(moe.shared_size, t)
        terms += [
            Term("mlp.shared", gate, NOTHING, inputs * at.w * shared, name),
            Term("mlp.shared.down", "input", NOTHING, at.w * shared, "activation"),
        ]
    return [
        *terms,
        Term("mlp.experts.up", "input", NOTHING, at.w * at.h * rows),
        Term("mlp.experts", gate, NOTHING, inputs * at.w * f * rows, name),
        Term("mlp.experts.down", "input", NOTHING, at.w * f * rows, "activation"),
        Term("mlp.experts.down", "weights", NOTHING, at.acc * rows),
    ]


def _inputs(config: Config, at: Sizes, sizes: ParallelSizes, part: str) -> list[Term]:
    """List the tokens that the router keeps, and the shared experts' input if that is another tensor."""
    shared = column_input(config, at, "mlp.shared.up", part)
    if sizes.tp > 1 and not config.parallel.sequence_parallel:
        own = Term("mlp.router", "input", NOTHING, Fraction(at.w * at.h, sizes.tp))
        return [own, shared] if _moe(config).shared_size else [own]
    tokens = Term("mlp.router", "input", NOTHING, at.w * at.h * at.shard, part)
    if not _moe(config).shared_size:
        return [tokens]
    # Both are one tensor, unless the shared experts keep it as gathered.
    return [tokens, shared] if shared.ours != tokens.ours else [shared]


def choice_terms(config: Config, at: Sizes, sizes: ParallelSizes) -> list[Term]:
    """List the tensors with the router's expert choice; a recomputed layer keeps these too."""
    moe = _moe(config)
    fractions = Fraction(at.acc * moe.num_experts * at.c, at.s) if moe.balance.sequence_loss else NOTHING
    return [
        Term("mlp.router", "choice", NOTHING, Fraction(INDEX_BYTES * moe.top_k, sizes.tp)),
        Term("mlp.router", "fractions", NOTHING, fractions),
    ]


def remembered_counts(config: Config, at: Sizes) -> Term:
    """Return what a recomputed layer remembers beside the choice: how many tokens chose each expert."""
    return Term("mlp.router", "counts", NOTHING, Fraction(INDEX_BYTES * _moe(config).num_experts * at.c, at.b * at.s))


def deferred_expert_terms(config: Config, at: Sizes, sizes: ParallelSizes, load: Fraction) -> list[Term]:
    """List the tensors held for routed experts' deferred weight gradients.

    For `down` the held input is the activated values times the routing weights, a product that the backward computes again.
    """
    model, moe = config.model, _moe(config)
    rows, inputs = rows_per_token(config, sizes, load), model.activation_kind.num_inputs
    f = Fraction(moe.ffn_hidden_size, sizes.etp)
    return [
        Term("mlp.experts.up", "input", NOTHING, at.w * at.h * rows),
        Term("mlp.experts.up", "gradient", NOTHING, inputs * at.w * f * rows),
        Term("mlp.experts.down", "weighted input", NOTHING, at.w * f * rows),
        Term("mlp.experts.down", "gradient", NOTHING, at.w * at.h * rows),
    ]


BACKWARD: Mapping[str, tuple[str, ...]] = {
    "mlp.experts.down": ("mlp", "mlp.experts.down", "mlp.experts"),
    "mlp.experts.up": ("mlp.dispatch",),
    "mlp.shared.down": ("mlp.shared",),
    "mlp.shared.up": ("mlp.router", "mlp_norm"),
}
"""Modules with deferred weight gradients, last first, each with the modules whose tensors are freed before the next one."""


def _moe(config: Config) -> MoEConfig:
    assert config.model.moe is not None, "a model with experts says which"
    return config.model.moe
