"""List the tensor names in Hugging Face models, by family.

Each table row pairs names of our tensors with Hugging Face names of tensors that hold the same numbers (`Table` in `family.py`).
`families.py` lists the sources.
"""

import re
from dataclasses import replace

from triaxis.models.interop.huggingface.family import Names, Naming, Table

_LLAMA_QKV: Table = (
    (("attention.q.weight",), ("self_attn.q_proj.weight",)),
    (("attention.kv.weight",), ("self_attn.k_proj.weight", "self_attn.v_proj.weight")),
    (("attention.q.bias",), ("self_attn.q_proj.bias",)),
    (("attention.kv.bias",), ("self_attn.k_proj.bias", "self_attn.v_proj.bias")),
)
_LLAMA_GATE_UP: Table = ((("mlp.gate_up.weight",), ("mlp.gate_proj.weight", "mlp.up_proj.weight")),)
_LLAMA_NORMS: Table = (
    (("attention.norm.weight",), ("input_layernorm.weight",)),
    (("mlp.norm.weight",), ("post_attention_layernorm.weight",)),
)
NORMS_AFTER: Table = (
    (("attention.post_norm.weight",), ("post_attention_layernorm.weight",)),
    (("mlp.post_norm.weight",), ("post_feedforward_layernorm.weight",)),
)
NORMS_BOTH: Table = (
    (("attention.norm.weight",), ("input_layernorm.weight",)),
    (("mlp.norm.weight",), ("pre_feedforward_layernorm.weight",)),
    *NORMS_AFTER,
)


def llama_naming(norms: Table = _LLAMA_NORMS, qkv: Table = _LLAMA_QKV, gate_up: Table = _LLAMA_GATE_UP) -> Naming:
    """Build the naming of a Llama-like family. Each argument replaces Llama's own rows."""
    return Naming(
        first=((("embedding.word.weight",), ("model.embed_tokens.weight",)),),
        layer=(
            *norms,
            *qkv,
            (("attention.q_norm.weight",), ("self_attn.q_norm.weight",)),
            (("attention.k_norm.weight",), ("self_attn.k_norm.weight",)),
            (("attention.proj.weight",), ("self_attn.o_proj.weight",)),
            *gate_up,
            (("mlp.down.weight",), ("mlp.down_proj.weight",)),
        ),
        last=((("final_norm.weight",), ("model.norm.weight",)), (("head.weight",), ("lm_head.weight",))),
        layer_prefix="model.layers.{}.",
        base_prefix="model.",
    )


LLAMA_NAMING = llama_naming()
PHI3_NAMING = llama_naming(
    qkv=((("attention.q.weight", "attention.kv.weight"), ("self_attn.qkv_proj.weight",)),),
    gate_up=((("mlp.gate_up.weight",), ("mlp.gate_up_proj.weight",)),),
)


_DEEPSEEK_QKV: Table = (
    (("attention.q_a.weight",), ("self_attn.q_a_proj.weight",)),
    (("attention.q_a_norm.weight",), ("self_attn.q_a_layernorm.weight",)),
    (("attention.q_b.weight",), ("self_attn.q_b_proj.weight",)),
    (("attention.q.weight",), ("self_attn.q_proj.weight",)),
    (("attention.kv_a.weight",), ("self_attn.kv_a_proj_with_mqa.weight",)),
    (("attention.kv_a_norm.weight",), ("self_attn.kv_a_layernorm.weight",)),
    (("attention.kv_b.weight",), ("self_attn.kv_b_proj.weight",)),
)


def with_experts(naming: Naming, block: str = "mlp", parts: Names = ("gate_proj", "up_proj", "down_proj")) -> Naming:
    """Add the names of experts, routers and shared experts to a naming.

    The result is for files with one tensor per expert. Its attribute `fused` is for files with one tensor for all experts of a
    layer.

    Args:
        block: name of the layer's module that holds the experts.
        parts: names of an expert's gate, up and down projections.
    """

    def router(block: str) -> Table:
        return (
            (("mlp.router.weight",), (f"{block}.gate.weight",)),
            (("mlp.router.bias",), (f"{block}.gate.e_score_correction_bias",)),
        )

    gate, up, down = (f"{block}.experts.{{}}.{part}.weight" for part in parts)
    shared = "mlp.shared_experts"
    layer: Table = (
        *naming.layer,
        (("mlp.shared.gate_up.weight",), (f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight")),
        (("mlp.shared.down.weight",), (f"{shared}.down_proj.weight",)),
    )
    ours = (("mlp.experts.gate_up.weight",), ("mlp.experts.down.weight",))
    fused = replace(
        naming,
        layer=(*layer, *router("mlp")),
        experts=((ours[0], ("mlp.experts.gate_up_proj",)), (ours[1], ("mlp.experts.down_proj",))),
    )
    return replace(
        naming, layer=(*layer, *router(block)), experts=((ours[0], (gate, up)), (ours[1], (down,))), fused=fused
    )


_ROTATED = ("self_attn.q_b_proj.weight", "self_attn.q_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
_DEEPSEEK_DENSE = replace(llama_naming(qkv=_DEEPSEEK_QKV), interleaved=frozenset(_ROTATED))
DEEPSEEK_V2_NAMING = with_experts(_DEEPSEEK_DENSE)
DEEPSEEK_V3_NAMING = with_experts(
    replace(
        _DEEPSEEK_DENSE,
        ahead=(
            (("mtp.embedding_norm.weight",), ("enorm.weight",)),
            (("mtp.hidden_norm.weight",), ("hnorm.weight",)),
            (("mtp.projection.weight",), ("eh_proj.weight",)),
            (("mtp.norm.weight",), ("shared_head.norm.weight",)),
        ),
        copies=(
            (("embedding.word.weight",), ("embed_tokens.weight",)),
            (("head.weight",), ("shared_head.head.weight",)),
        ),
    )
)


def _with_biases(*rows: tuple[Names, Names]) -> Table:
    """Insert, after each row of weights, the row for the same layers' biases."""

    def bias(names: Names) -> Names:
        return tuple(name.replace(".weight", ".bias") for name in names)

    return [each for row in rows for each in (row, (bias(row[0]), bias(row[1])))]


GPT2_NAMING = Naming(
    first=(
        (("embedding.word.weight",), ("transformer.wte.weight",)),
        (("embedding.position.weight",), ("transformer.wpe.weight",)),
    ),
    layer=_with_biases(
        (("attention.norm.weight",), ("ln_1.weight",)),
        (("attention.q.weight", "attention.kv.weight"), ("attn.c_attn.weight",)),
        (("attention.proj.weight",), ("attn.c_proj.weight",)),
        (("mlp.norm.weight",), ("ln_2.weight",)),
        (("mlp.up.weight",), ("mlp.c_fc.weight",)),
        (("mlp.down.weight",), ("mlp.c_proj.weight",)),
    ),
    last=(
        *_with_biases((("final_norm.weight",), ("transformer.ln_f.weight",))),
        (("head.weight",), ("lm_head.weight",)),
    ),
    layer_prefix="transformer.h.{}.",
    base_prefix="transformer.",
    transposed=True,
    buffers=re.compile(r".*h\.\d+\.attn\.(masked_)?bias"),
)
NEOX_NAMING = Naming(
    first=((("embedding.word.weight",), ("gpt_neox.embed_in.weight",)),),
    layer=_with_biases(
        (("attention.norm.weight",), ("input_layernorm.weight",)),
        (("attention.q.weight", "attention.kv.weight"), ("attention.query_key_value.weight",)),
        (("attention.proj.weight",), ("attention.dense.weight",)),
        (("mlp.norm.weight",), ("post_attention_layernorm.weight",)),
        (("mlp.up.weight",), ("mlp.dense_h_to_4h.weight",)),
        (("mlp.down.weight",), ("mlp.dense_4h_to_h.weight",)),
    ),
    last=(
        *_with_biases((("final_norm.weight",), ("gpt_neox.final_layer_norm.weight",))),
        (("head.weight",), ("embed_out.weight",)),
    ),
    layer_prefix="gpt_neox.layers.{}.",
    base_prefix="gpt_neox.",
    by_head=frozenset({"attention.query_key_value.weight", "attention.query_key_value.bias"}),
    buffers=re.compile(r".*\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)"),
)
