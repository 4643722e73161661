"""The `model.mla` section: multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1), and its rules.

    c_q  = norm(W_qa x)   [q_lora_rank]          q_i = [rope(W_qr c_q) | W_qn c_q]       per head, dr + dn
    c_kv = norm(W_kva x)  [kv_lora_rank]         k_i = [rope(W_kr x) | W_kn c_kv]        the rotated part is one for all heads
                                                 v_i = W_v c_kv                          per head, dv

x is a token's hidden state, i a head. A query or key has dr rotated elements (`qk_rope_head_dim`) and dn others
(`qk_nope_head_dim`); a value has dv (`v_head_dim`). Queries and keys have the rotated part first, as in every head in this project
that rotates in part. Caches and context parallelism store and gather c_kv and the rotated key: kv_lora_rank + dr numbers per token,
however many heads there are.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from triaxis.engine.config.section import Problem, Rule, Section, Subject, multiples, numbers

if TYPE_CHECKING:
    from triaxis.engine.config.attention_kinds import LayerKind
    from triaxis.engine.config.model import ModelConfig

LARGEST_RANK = 2**24
"""Maximum size of a latent, or of a part of a head, in elements."""


class MLAConfig(Section):
    """Multi-head latent attention: all heads' keys and values are computed from one small vector per token."""

    q_lora_rank: int | None = Field(
        None, gt=0, le=LARGEST_RANK, description="size of the queries' latent; null: queries are projected from x"
    )
    kv_lora_rank: int = Field(gt=0, le=LARGEST_RANK, description="size of the latent of keys and values")
    qk_nope_head_dim: int = Field(
        gt=0, le=LARGEST_RANK, description="elements of a query or key that come from a latent"
    )
    qk_rope_head_dim: int = Field(gt=0, le=LARGEST_RANK, description="elements that rotate; of keys one for all heads")
    v_head_dim: int = Field(gt=0, le=LARGEST_RANK, description="elements of a value")

    @property
    def qk_head_dim(self) -> int:
        """Size of a query or a key, in elements."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_size(self) -> int:
        """Elements per token in c_kv and the rotated key, from which all heads' keys and values are computed."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def latent_size(self) -> int:
        """Elements per token that the down-projections of x compute: both latents and the rotated key."""
        return (self.q_lora_rank or 0) + self.cached_size


def softmax_scale(model: "ModelConfig", kind: "LayerKind") -> float | None:
    """Factor on a layer's attention logits; None: 1 / sqrt(query size).

    With latent attention and YaRN's `mscale_all_dim` m, the factor is (0.1 m ln(factor) + 1)^2 / sqrt(query size), as in DeepSeek's
    own code. If `model.attention_scale` is set, it is the factor.
    """
    if model.attention_scale is not None or model.mla is None:
        return model.attention_scale
    scale = float(model.head_size**-0.5)
    scaling = None if kind.rotary is None else kind.rotary.scaling
    if scaling is None or scaling.mscale_all_dim is None or scaling.factor is None or scaling.factor <= 1:
        return scale
    mscale = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0
    return scale * mscale * mscale


def fields_go_with_mla(subject: Subject) -> Iterator[Problem]:
    """Yield a problem for each field that latent attention does not use or support."""
    model = subject.config.model
    if model.mla is None:
        return
    if model.num_kv_heads is not None:
        yield subject.problem(
            "model.num_kv_heads",
            "has no meaning with model.mla: every query head has keys and values of its own, all made from one latent",
            {"model.num_kv_heads": [None]},
        )
    if model.head_dim is not None:
        yield subject.problem(
            "model.head_dim",
            "has no meaning with model.mla: queries and keys have qk_nope_head_dim + qk_rope_head_dim elements, values v_head_dim",
            {"model.head_dim": [None]},
        )
    if model.qk_norm:
        yield subject.problem(
            "model.qk_norm",
            "does not go with model.mla: latent attention has a norm on each latent, and none on queries and keys",
            {"model.qk_norm": [False]},
        )
    if model.bias != "none":
        yield subject.problem(
            "model.bias",
            "does not go with model.mla: its projections, through the latents, have no biases",
            {"model.bias": ["none"]},
        )
    shares = {"model": model.rotary_share} | {
        f"model.layer_kinds.{name}": kind["rotary_share"]
        for name, kind in model.layer_kinds.items()
        if "rotary_share" in kind
    }
    for where, share in shares.items():
        if share != 1.0:
            yield Problem(
                f"{where}.rotary_share",
                share,
                "has no effect with model.mla: what rotates of a head is model.mla.qk_rope_head_dim",
                {f"{where}.rotary_share": [1.0]},
            )


def sizes_of_mla(subject: Subject) -> Iterator[Problem]:
    model = subject.config.model
    mla = model.mla
    if mla is None:
        return
    if mla.qk_rope_head_dim % 2 and any(kind.rotary for kind in model.kinds):
        yield subject.problem(
            "model.mla.qk_rope_head_dim",
            "must be even: RoPE turns pairs of elements, and one would be left over",
            {"model.mla.qk_rope_head_dim": multiples(2, mla.qk_rope_head_dim)},
        )
    if mla.v_head_dim > mla.qk_head_dim:
        yield subject.problem(
            "model.mla.v_head_dim",
            f"must be at most the {mla.qk_head_dim} elements of a query: fused kernels have one size of heads, to which values are "
            f"padded",
            {"model.mla.v_head_dim": [mla.qk_head_dim], "model.mla.qk_nope_head_dim": numbers(mla.v_head_dim)},
        )


def latents_over_cp(subject: Subject) -> Iterator[Problem]:
    """Yield a problem for each context-parallel choice that latent attention does not support."""
    model, parallel = subject.config.model, subject.config.parallel
    if model.mla is None or parallel.cp == 1:
        return
    if parallel.cp_method == "ulysses":
        yield subject.problem(
            "parallel.cp_method",
            "trades tokens for heads of queries, keys and values, which have one size there; with model.mla keys and values are "
            "made from a latent, which is smaller than the heads that would travel",
            {"parallel.cp_method": ["all_gather", "auto"]},
        )
    if subject.config.recompute.gathered_kv == "keep":
        yield subject.problem(
            "recompute.gathered_kv",
            "has no effect with model.mla: gathered are latents, which are kept, and keys and values are made from them; "
            "recompute.modules=[attention] makes those again",
            {"recompute.gathered_kv": ["auto"]},
        )


MLA_RULES: tuple[Rule, ...] = (fields_go_with_mla, sizes_of_mla, latents_over_cp)
