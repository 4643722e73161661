"""List the tensors that attention keeps for its backward: queries, keys, values, and explicit attention's scores."""

from fractions import Fraction

from triaxis.engine.config.quantities.attention_pattern import attention_pattern
from triaxis.engine.config.quantities.context_parallel import gathers_keys
from triaxis.engine.config.schema.layer_kinds import LayerKind
from triaxis.engine.config.tree import Config
from triaxis.models.predict.terms import Sizes, Term


def operand_terms(config: Config, at: Sizes, kind: LayerKind, is_as_made: bool, *, is_exchanged: bool) -> list[Term]:
    """List the queries, keys and values that attention keeps.

    Args:
        is_as_made: attention keeps q, k and v as they were computed; if False, explicit attention copies them first.
        is_exchanged: heads were exchanged over cp (Ulysses).
    """
    model, nothing = config.model, Fraction(0)
    is_fused = config.kernels.attention != "explicit"
    q, k = at.w * at.q, at.w * at.kv
    # QK-norm makes new q and k, but v keeps the old ones alive: all three are parts of one product. A rotation without QK-norm is
    # in place, unless the backward needs gathered copies of k and v.
    is_gathered = gathers_keys(config)
    is_new = bool(model.qk_norm) or (kind.rotary is not None and is_gathered)
    if is_exchanged:
        # The received tensors share one storage. QK-norm still needs the product; explicit attention copies, as below.
        terms = [Term("attention", "q, k and v", nothing, q + 2 * k if model.qk_norm else nothing)]
        if is_as_made:
            terms.append(Term("attention", "exchanged q, k and v", q + 2 * k, q + 2 * k))
        else:
            copies = (("q", q, q if at.b > 1 else q + 2 * k), ("k", k, q), ("v", k, q))
            terms += [Term("attention", f"exchanged {name}", paper, ours) for name, paper, ours in copies]
    elif is_as_made:
        # Gathered k and v are copies, from all ranks or this one. The product then stays alive only if q needs it.
        is_held = not is_gathered or not is_new or bool(model.qk_norm)
        terms = [Term("attention", "q, k and v", q + 2 * k, q + 2 * k if is_held else nothing)]
        for name, num_bytes in (("new q", q), ("new k", nothing if is_gathered else k)):
            part = "rope" if model.qk_norm else ""
            terms.append(Term("attention", name, nothing, num_bytes if is_new else nothing, part))
        copied = at.c if not is_fused or config.recompute.gathered_kv == "keep" else 1
        terms.append(Term("attention", "copied k and v", nothing, 2 * k * copied if is_gathered else nothing))
    else:
        # torch copies its operands, with one k and v per query head. It need not copy q for a single sample; q then keeps the
        # whole product alive.
        first = q if is_new or at.b > 1 else q + 2 * k
        terms = [
            Term("attention", name, paper, copied)
            for name, paper, copied in (("q", q, first), ("k", k, q * at.c), ("v", k, q * at.c))
        ]
    if model.qk_norm == "all_heads":
        terms.append(Term("attention", "squares of q and of k", nothing, Fraction(2 * at.acc)))
    elif model.qk_norm:
        for name, heads in (("q", at.heads), ("k", at.kv_heads)):
            terms.append(Term("attention", f"deviations of {name}-norm", nothing, at.acc * heads))
    return terms


def score_terms(config: Config, at: Sizes, kind: LayerKind, *, is_exchanged: bool) -> list[Term]:
    """List the tensors that explicit attention keeps between its two products (scores, weighted values)."""
    model, nothing = config.model, Fraction(0)
    scores = at.heads * at.s
    dropout = at.w * scores if model.attention_dropout else nothing
    # Sinks add one column to the softmax.
    columns = scores + at.heads * kind.sinks
    pattern = attention_pattern(config)
    by_row = pattern.documents or pattern.parts
    each = [
        ("capped scores", nothing, at.acc * scores if model.attention_softcap is not None else nothing),
        ("softmax", at.w * scores, at.acc * columns),
        ("softmax dropout", scores, dropout),
        ("probabilities", at.w * scores, at.w * scores),
        # A causal mask serves all rows; masks with documents or parts differ from row to row.
        ("mask", nothing, Fraction(at.s * (at.c if is_exchanged else 1), 1 if by_row else at.b)),
    ]
    if at.acc == at.w and not model.attention_dropout:
        each.remove(("probabilities", at.w * scores, at.w * scores))
        each.append(("probabilities (the softmax itself)", at.w * scores, nothing))
    return [Term("attention", name, paper, ours, "attention") for name, paper, ours in each]
