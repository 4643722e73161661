"""List the tensors that latent attention keeps between its norm and its output projection.

Bytes per token of a rank, for w bytes per element, hidden size h, n heads on the rank, t tensor- and c context-parallel ranks,
latent sizes r_q (queries) and r (keys and values), and head sizes dn + dr (queries, keys) and dv (values):

    down     input w h /t, which queries without a latent share; output w (r_q + r + dr) /t; one number for each norm
    q_up     input w r_q /t, or w r_q if gathered inputs are kept
    kv_up    input w r c, gathered over the context-parallel ranks
    q, k     w n (dn + dr) and w n (dn + dr) c
    v        with a fused kernel that needs equal head sizes: padded, w n (dn + dr) c, and then the padded output, w n (dn + dr)
             with another fused kernel: kv_up's whole output, w n (dn + dv) c
             with the kernel `explicit`: a copy, w n dv c

/t applies only with sequence parallelism. If attention's core is recomputed, q and the gathered latents, w (r + dr) c, are kept,
and nothing from kv_up on.
"""

from fractions import Fraction

from triaxis.engine.config.schema.layer_kinds import LayerKind
from triaxis.engine.config.schema.mla import MLAConfig
from triaxis.engine.config.tree import Config
from triaxis.models.predict.terms import Sizes, Term, keeps_gathered

NOTHING = Fraction(0)

BEHIND_LATENTS = {
    "attention.kv_up": "",
    "attention.q_up": "attention.latents",
    "attention.down": "attention_norm",
}
"""Products before attention in backward order, each with the module whose tensors are free after it."""


def latent_terms(config: Config, at: Sizes, kind: LayerKind, mla: MLAConfig, *, is_core_again: bool) -> list[Term]:
    """List the tensors that latent attention keeps, by the module docstring's formulas.

    Args:
        is_core_again: attention's core is recomputed, so the gathered latents are kept, not the keys and values.
    """
    part = "norm" if config.model.norms_before else ""
    own, q = at.w * at.h * at.shard, at.w * at.q
    terms = [
        Term("attention.down", "input", own, own, part),
        Term("attention.latents", "latents and key", NOTHING, at.w * mla.latent_size * at.shard),
        Term("attention.latents", "deviations of the norm of keys", NOTHING, at.acc * at.shard),
    ]
    if mla.q_lora_rank is not None:
        terms.append(Term("attention.latents", "deviations of the norm of queries", NOTHING, at.acc * at.shard))
        width = at.w * mla.q_lora_rank
        kept = Term("attention.q_up", "input", NOTHING, Fraction(width))
        terms.append(
            kept if keeps_gathered(config, at) else Term("attention.q_up", "input", NOTHING, width * at.shard, "norm")
        )
    elif keeps_gathered(config, at):
        terms.append(Term("attention.q_up", "input", NOTHING, Fraction(at.w * at.h)))
    is_explicit = config.kernels.attention == "explicit"
    if is_explicit and not is_core_again:
        # A single sample's queries are multiplied as they are, several samples' are copied. Keys and values are always copied.
        terms.append(Term("attention", "q", q, q))
    else:
        is_projected = kind.rotary is None or "rope" in config.recompute.parts
        terms.append(Term("attention", "q", q, q if is_projected else NOTHING))
        terms.append(Term("attention", "new q", NOTHING, NOTHING if kind.rotary is None else q, "rope"))
    if is_core_again:
        return [*terms, Term("attention", "gathered latents", NOTHING, Fraction(at.w * mla.cached_size * at.c))]
    is_padded = not is_explicit and _pads_values(config, mla)
    made = at.w * at.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    values = at.w * at.out if is_explicit else q if is_padded else made
    terms += [
        Term("attention.kv_up", "input", NOTHING, Fraction(at.w * mla.kv_lora_rank * at.c), "attention"),
        Term("attention", "k", q, q * at.c, "attention"),
        Term("attention", "v", at.w * at.out, values * at.c, "attention"),
    ]
    return [*terms, Term("attention", "padded output", NOTHING, q, "attention")] if is_padded else terms


def _pads_values(config: Config, mla: MLAConfig) -> bool:
    """Whether a fused kernel gets values padded to the key size, because the two sizes differ.

    Every fused kernel needs equal sizes except `flex` and `blocks`, of which `auto` chooses one for capped logits.
    """
    kernel = config.kernels.attention
    is_capped = kernel in ("flex", "blocks") or (kernel == "auto" and config.model.attention_softcap is not None)
    return mla.v_head_dim != mla.qk_head_dim and not is_capped
