"""List the tensors that one transformer layer keeps for its backward, from the configuration alone.

`triaxis.models.predict.activation_memory` explains the terms. A linear layer keeps its input to compute its weight gradient.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from triaxis.engine.config.quantities.context_parallel import gathers_keys
from triaxis.engine.config.schema.layer_kinds import LayerKind
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.models.predict.attention_terms import operand_terms, score_terms
from triaxis.models.predict.experts.memory import BALANCED, expert_terms
from triaxis.models.predict.fp8_terms import is_in_fp8, kept_in_fp8
from triaxis.models.predict.latent_terms import latent_terms
from triaxis.models.predict.mtp_terms import joining_terms
from triaxis.models.predict.terms import Sizes, Term, column_input


def block_terms(config: Config, sizes: ParallelSizes, layer: int = 0, load: Fraction = BALANCED) -> list[Term]:
    """List the tensors of one transformer layer that is not recomputed as a whole; recomputed ones count 0 bytes.

    Args:
        layer: index of the layer in the model.
        load: rows that the rank's experts get, over the rows under balanced routing.
    """
    parts = config.recompute.parts_made_again
    terms = all_terms(config, sizes, layer_sort(config, layer), load, parts)
    return [replace(term, ours=Fraction(0)) if term.part in parts else term for term in terms]


class LayerSort(NamedTuple):
    """The properties of a layer on which its bytes and seconds depend.

    Attributes:
        kind: the layer's attention and MLP.
        is_in_fp8: the linear layers have FP8 operands.
    """

    kind: LayerKind
    is_in_fp8: bool


def all_terms(
    config: Config, sizes: ParallelSizes, sort: LayerSort, load: Fraction, parts: Collection[str] = ()
) -> list[Term]:
    """List the tensors that a layer keeps, including those that recomputation would replace.

    Args:
        load: rows that the rank's experts get, over the rows under balanced routing.
        parts: recomputed parts of the layer. If `attention` is one, queries, keys and values are listed as attention's core
            receives them; otherwise as the core keeps them, perhaps copied.
    """
    kind = sort.kind
    at, is_core_again = Sizes.of(config, sizes), "attention" in parts
    model = config.model
    whole = at.w * at.h * at.shard
    dropped = at.h * at.shard
    nothing = Fraction(0)
    dropout = whole if model.hidden_dropout else nothing
    mlp = expert_terms(config, at, sizes, load) if kind.has_experts else _mlp_terms(config, at)
    terms = [
        *(joining_terms(config, at) if kind.is_mtp else []),
        *(norm_terms(config, at, "attention_norm") if model.norms_before else []),
        *attention_part(config, at, kind, is_core_again=is_core_again),
        Term("attention.proj", "input", at.w * at.out, at.w * at.out),
        *(norm_terms(config, at, "attention_post_norm") if model.norms_after else []),
        Term("attention", "residual dropout", dropped, dropout),
        *_behind_attention(config, at, mlp),
        *(norm_terms(config, at, "mlp_post_norm") if model.norms_after else []),
        Term("mlp", "residual dropout", dropped, dropout),
        Term("block", "an extension's parts against ours", nothing, config.model.own_costs.kept, moves=False),
    ]
    return kept_in_fp8(config, at, terms, parts) if sort.is_in_fp8 else terms


def _mlp_terms(config: Config, at: Sizes) -> list[Term]:
    """List the tensors that a dense MLP keeps for its backward."""
    model, nothing = config.model, Fraction(0)
    terms = [column_input(config, at, "mlp.up", "norm" if model.norms_before else "")]
    if model.activation_kind.is_gated:
        # Unfused Megatron-LM keeps the activated gate too; this engine recomputes it.
        terms += [
            Term("mlp", "gate and up", 2 * at.w * at.f, 2 * at.w * at.f, "mlp"),
            Term("mlp", f"{model.activation_kind.pointwise}(gate)", at.w * at.f, nothing),
        ]
    else:
        terms.append(Term("mlp", "activation input", at.w * at.f, at.w * at.f, "mlp"))
    return [*terms, Term("mlp.down", "input", at.w * at.f, at.w * at.f, "activation")]


def _behind_attention(config: Config, at: Sizes, mlp: Sequence[Term]) -> list[Term]:
    """List the terms between attention and the last residual addition: the norm before the MLP, then the MLP.

    In a parallel block, the first of these terms is the tensor that attention also keeps as its input, so it counts 0.
    """
    model = config.model
    first, *others = [*(norm_terms(config, at, "mlp_norm") if model.norms_before else []), *mlp]
    is_whole = first.ours == at.w * at.h * at.shard
    return [replace(first, ours=Fraction(0)) if model.parallel_block and is_whole else first, *others]


def norm_terms(config: Config, at: Sizes, module: str) -> list[Term]:
    nothing = Fraction(0)
    whole = at.w * at.h * at.shard
    kind = config.model.norm_kind
    number = (at.w if kind.statistics_dtype == "run" else at.acc) * at.shard
    return [Term(module, "input", whole, whole), *(Term(module, name, nothing, number) for name in kind.statistics)]


def attention_part(config: Config, at: Sizes, kind: LayerKind, *, is_core_again: bool) -> list[Term]:
    """List the tensors between attention's norm and its output projection.

    The paper (2205.05198) counts, in bytes per token with hidden size h, a heads and sequence length s: 4 h for q and k, 2 h
    for v, 2 a s for the softmax, a s for the dropout mask, 2 a s for the dropout's output.

    Args:
        is_core_again: attention's core is recomputed, so its operands are listed as the core receives them.
    """
    model = config.model
    is_fused = config.kernels.attention != "explicit"
    is_exchanged = at.c > 1 and not gathers_keys(config)
    if model.mla is not None:
        operands = latent_terms(config, at, kind, model.mla, is_core_again=is_core_again)
    else:
        operands = [column_input(config, at, "attention.qkv", "norm" if model.norms_before else "")]
        operands += operand_terms(config, at, kind, is_fused or is_core_again, is_exchanged=is_exchanged)
    # With gathered keys and values attention is not recomputed: its backward gathers them itself.
    part = "" if gathers_keys(config) and model.mla is None else "attention"
    if is_fused:
        output = (
            [Term("attention", "output of exchanged heads", Fraction(0), at.w * at.q, part)] if is_exchanged else []
        )
        return [
            *operands,
            *output,
            Term("attention", "logarithm of each row's sum", Fraction(0), at.acc * at.heads, part),
        ]
    return operands + score_terms(config, at, kind, is_exchanged=is_exchanged)


def per_token(terms: Sequence[Term]) -> Fraction:
    """Sum the bytes per token that this engine keeps."""
    return sum((term.ours for term in terms), Fraction(0))


def paper_per_token(terms: Sequence[Term]) -> Fraction:
    """Sum the bytes per token in the paper's count."""
    return sum((term.paper for term in terms), Fraction(0))


def layer_sort(config: Config, layer: int) -> LayerSort:
    return LayerSort(config.model.layer_kind(layer), is_in_fp8(config, layer))
