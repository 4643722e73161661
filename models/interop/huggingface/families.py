"""The families of Hugging Face models, each a record (no torch here).

No function of this room has a family's name in it: what differs between families is data here.

Sources: the configuration and modeling files of transformers 5 (`configuration_gpt2.py`, ...) for keys, for the defaults of those
that a file may leave out, and for names of tensors; files of published models for keys that older releases wrote.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.interop.huggingface.family import (
    FULL,
    SLIDING,
    DerivedKey,
    Family,
    LayerKeys,
    Names,
    Naming,
    RopeKeys,
    ScaleKey,
    Table,
)

# Names of tensors ------------------------------------------------------------------------------------------------------

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
_NORMS_AFTER: Table = (
    (("attention.post_norm.weight",), ("post_attention_layernorm.weight",)),
    (("mlp.post_norm.weight",), ("post_feedforward_layernorm.weight",)),
)
_NORMS_BOTH: Table = (
    (("attention.norm.weight",), ("input_layernorm.weight",)),
    (("mlp.norm.weight",), ("pre_feedforward_layernorm.weight",)),
    *_NORMS_AFTER,
)


def _llama_naming(norms: Table = _LLAMA_NORMS, qkv: Table = _LLAMA_QKV, gate_up: Table = _LLAMA_GATE_UP) -> Naming:
    """Build the names of a family like Llama with these rows in place of Llama's."""
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


_LLAMA_NAMING = _llama_naming()
_PHI3_NAMING = _llama_naming(
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
_ROTATED = ("self_attn.q_b_proj.weight", "self_attn.q_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
_DEEPSEEK_NAMING = replace(_llama_naming(qkv=_DEEPSEEK_QKV), interleaved=frozenset(_ROTATED))


def _with_biases(*rows: tuple[Names, Names]) -> Table:
    """Return rows of weights, each followed by the row of its biases."""

    def bias(names: Names) -> Names:
        return tuple(name.replace(".weight", ".bias") for name in names)

    return [each for row in rows for each in (row, (bias(row[0]), bias(row[1])))]


_GPT2_NAMING = Naming(
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
_NEOX_NAMING = Naming(
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

# Keys ------------------------------------------------------------------------------------------------------------------

_LLAMA_NAMES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "seq_length",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "attention_dropout": "attention_dropout",
    "initializer_range": "init_std",
}
_LLAMA_FIXED = {"norm": "rmsnorm", "position": "rope", "bias": "none", "qk_norm": False}
_LLAMA_DEFAULTS = {
    "hidden_act": "silu",
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
}


def _one_base(base: float) -> RopeKeys:
    return RopeKeys({"": (("rope_theta",), base)})


def _llama_like(
    architecture: str,
    *,
    fixed: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
    names: Mapping[str, str] | None = None,
    naming: Naming = _LLAMA_NAMING,
    rope: RopeKeys | None = None,
    **others: Any,
) -> Family:
    """Build a family with Llama's keys and names, with what differs from them."""
    return Family(
        architecture,
        naming,
        {**_LLAMA_NAMES, **(names or {})},
        {**_LLAMA_FIXED, **(fixed or {})},
        {**_LLAMA_DEFAULTS, **(defaults or {})},
        rope=rope or _one_base(10000.0),
        **others,
    )


def _scalar(scale: float) -> float | None:
    """Return the whole number whose inverse square root the scale of attention is; None: there is none."""
    scalar = round(scale**-2)
    return scalar if scalar and scalar**-0.5 == scale else None


_QWEN_LAYERS = LayerKeys("some", 4096, "use_sliding_window", first=("max_window_layers", 28))
_GEMMA_FIXED = {"norm": "rmsnorm_1p", "norm_placement": "both"}
_GEMMA_DEFAULTS: Mapping[str, object] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
}
_GEMMA_PARTS: Mapping[str, Any] = {
    "naming": _llama_naming(_NORMS_BOTH),
    "activation_key": "hidden_activation",
    "scale": ScaleKey("query_pre_attn_scalar", 256, lambda scalar: scalar**-0.5, _scalar),
    "computed": {"embedding_multiplier": ("hidden_size", math.sqrt)},
    "heads_divide_hidden": True,
}
_LATER_TOKENS = ((False, None), "attention to later tokens is not built: Triaxis trains decoders")


def _deepseek(architecture: str, **others: Any) -> Family:
    """Build a family with latent attention. Its layers are dense: those with experts are not built."""
    absent = ("num_key_value_heads", "head_dim")
    return Family(
        architecture,
        _DEEPSEEK_NAMING,
        {theirs: ours for theirs, ours in _LLAMA_NAMES.items() if theirs not in absent},
        # The norms of latents have an epsilon of their own in transformers, which is no key.
        {**_LLAMA_FIXED, "norm_eps": 1e-6},
        {theirs: value for theirs, value in _LLAMA_DEFAULTS.items() if theirs not in absent},
        rope=_one_base(10000.0),
        off={
            "rope_interleave": ((True,), "RoPE whose pairs are no neighbours is not read for this family"),
            "rms_norm_eps": ((1e-6,), "norms of latents have the epsilon 1e-6, and here all norms have one"),
        },
        latents={
            "q_lora_rank": ("q_lora_rank", 1536),
            "kv_lora_rank": ("kv_lora_rank", 512),
            "qk_nope_head_dim": ("qk_nope_head_dim", 128),
            "qk_rope_head_dim": ("qk_rope_head_dim", 64),
            "v_head_dim": ("v_head_dim", 128),
        },
        derived={
            "first_k_dense_replace": DerivedKey(
                lambda model: model.num_layers,
                "layers with experts are not built with latent attention",
                may_lack=False,
            ),
            "num_key_value_heads": DerivedKey(
                lambda model: model.num_attention_heads,
                "each head has keys and values of its own, made from the latent",
            ),
            "qk_head_dim": DerivedKey(
                lambda model: model.head_size, "queries have qk_nope_head_dim + qk_rope_head_dim"
            ),
            "head_dim": DerivedKey(
                lambda model: None if model.mla is None else model.mla.qk_rope_head_dim,
                "in files of this family it is the part that rotates",
            ),
        },
        unused=_OF_EXPERTS,
        **others,
    )


_OF_EXPERTS = frozenset(
    {
        "aux_loss_alpha",
        "ep_size",
        "moe_intermediate_size",
        "moe_layer_freq",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "num_mtp_layers",
        "num_nextn_predict_layers",
        "output_router_logits",
        "routed_scaling_factor",
        "router_aux_loss_coef",
        "scoring_func",
        "seq_aux",
        "topk_group",
        "topk_method",
    }
)
"""Keys of layers with experts, of which a file with dense layers alone has none, and of heads that predict further tokens."""

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        naming=_GPT2_NAMING,
        names={
            "n_layer": "num_layers",
            "n_embd": "hidden_size",
            "n_head": "num_attention_heads",
            "n_inner": "ffn_hidden_size",
            "n_positions": "seq_length",
            "vocab_size": "vocab_size",
            "layer_norm_epsilon": "norm_eps",
            "tie_word_embeddings": "tie_embeddings",
            "resid_pdrop": "hidden_dropout",
            "attn_pdrop": "attention_dropout",
            "initializer_range": "init_std",
        },
        fixed={"norm": "layernorm", "position": "learned", "bias": "all", "qk_norm": False},
        defaults={
            "activation_function": "gelu_new",
            "n_inner": None,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "resid_pdrop": 0.1,
            "attn_pdrop": 0.1,
            "initializer_range": 0.02,
        },
        activation_key="activation_function",
        is_gated=False,
        embedding_dropout=0.1,
    ),
    "llama": _llama_like("LlamaForCausalLM", heads_divide_hidden=True),
    "mistral": _llama_like(
        "MistralForCausalLM", defaults={"num_key_value_heads": 8}, layers=LayerKeys("all", default_window=4096)
    ),
    "qwen2": _llama_like(
        "Qwen2ForCausalLM", fixed={"bias": "qkv"}, defaults={"num_key_value_heads": 32}, layers=_QWEN_LAYERS
    ),
    "qwen3": _llama_like(
        "Qwen3ForCausalLM",
        fixed={"qk_norm": True},
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        layers=_QWEN_LAYERS,
    ),
    "gpt_neox": Family(
        architecture="GPTNeoXForCausalLM",
        naming=_NEOX_NAMING,
        names={
            "num_hidden_layers": "num_layers",
            "hidden_size": "hidden_size",
            "num_attention_heads": "num_attention_heads",
            "intermediate_size": "ffn_hidden_size",
            "max_position_embeddings": "seq_length",
            "vocab_size": "vocab_size",
            "layer_norm_eps": "norm_eps",
            "tie_word_embeddings": "tie_embeddings",
            "hidden_dropout": "hidden_dropout",
            "attention_dropout": "attention_dropout",
            "initializer_range": "init_std",
            "use_parallel_residual": "parallel_block",
        },
        fixed={"norm": "layernorm", "position": "rope", "bias": "all", "qk_norm": False},
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_parallel_residual": True,
        },
        is_gated=False,
        # Files of before transformers 5 have both spellings of each.
        rope=RopeKeys(
            {"": (("rotary_emb_base", "rope_theta"), 10000.0)}, share=(("rotary_pct", "partial_rotary_factor"), 0.25)
        ),
        off={"attention_bias": ((True,), "attention without biases, next to an MLP that has some, is not built")},
    ),
    "gemma2": _llama_like(
        "Gemma2ForCausalLM",
        names={"attn_logit_softcapping": "attention_softcap", "final_logit_softcapping": "logit_softcap"},
        fixed=_GEMMA_FIXED,
        defaults={**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        layers=LayerKeys("some", 4096, period=("", 2)),
        off={"use_bidirectional_attention": _LATER_TOKENS},
        **_GEMMA_PARTS,
    ),
    "gemma3_text": _llama_like(
        "Gemma3ForCausalLM",
        names={"final_logit_softcapping": "logit_softcap"},
        fixed={**_GEMMA_FIXED, "qk_norm": True},
        # The published files of this family are short: they leave out most of what has a default.
        defaults={
            **_GEMMA_DEFAULTS,
            "num_hidden_layers": 26,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "final_logit_softcapping": None,
        },
        rope=RopeKeys({FULL: (("rope_theta",), 1e6), SLIDING: (("rope_local_base_freq",), 10000.0)}),
        layers=LayerKeys("some", 4096, period=("sliding_window_pattern", 6)),
        off={
            "use_bidirectional_attention": _LATER_TOKENS,
            "attn_logit_softcapping": ((None,), "this family's attention has no cap in transformers"),
        },
        **_GEMMA_PARTS,
    ),
    "olmo2": _llama_like(
        "Olmo2ForCausalLM",
        naming=_llama_naming(_NORMS_AFTER),
        fixed={"norm_placement": "after", "qk_norm": "all_heads"},
        defaults={"rms_norm_eps": 1e-5},
    ),
    "olmo3": _llama_like(
        "Olmo3ForCausalLM",
        naming=_llama_naming(_NORMS_AFTER),
        fixed={"norm_placement": "after", "qk_norm": "all_heads"},
        defaults={"rms_norm_eps": 1e-5},
        rope=RopeKeys({FULL: (("rope_theta",), 500000.0), SLIDING: (("rope_theta",), 500000.0)}),
        layers=LayerKeys("some", 4096, period=("", 4)),
    ),
    "phi3": _llama_like(
        "Phi3ForCausalLM",
        naming=_PHI3_NAMING,
        names={"resid_pdrop": "hidden_dropout"},
        defaults={"rms_norm_eps": 1e-5, "resid_pdrop": 0.0},
        rope=RopeKeys({"": (("rope_theta",), 10000.0)}, share=(("partial_rotary_factor",), 1.0), original_length=4096),
        layers=LayerKeys("all"),
        embedding_dropout=0.0,
    ),
    "smollm3": _llama_like(
        "SmolLM3ForCausalLM",
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
        rope=_one_base(2e6),
        layers=LayerKeys("some", switch="use_sliding_window", no_rope=("no_rope_layers", "no_rope_layer_interval", 4)),
    ),
    "granite": _llama_like(
        "GraniteForCausalLM",
        names={
            "embedding_multiplier": "embedding_multiplier",
            "residual_multiplier": "residual_multiplier",
            "logits_scaling": "logit_divisor",
        },
        defaults={"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
        scale=ScaleKey("attention_multiplier", 1.0, float, float),
    ),
    "deepseek_v3": _deepseek("DeepseekV3ForCausalLM"),
    "deepseek_v2": _deepseek("DeepseekV2ForCausalLM", heads_divide_hidden=True),
}
"""By `model_type`, those first that an export takes where several would do."""
