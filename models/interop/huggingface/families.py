"""Describe each supported Hugging Face model family in a record.

No function in this package mentions a family by name.

Sources: transformers 5 (`configuration_gpt2.py`, `modeling_gpt2.py`, ..), and published files for keys of older releases.
"""

import math
from collections.abc import Mapping
from typing import Any

from triaxis.models.interop.huggingface.family import (
    FULL,
    SLIDING,
    DerivedKey,
    ExpertKeys,
    Family,
    LayerKeys,
    Names,
    Naming,
    RopeKeys,
    ScaleKey,
)
from triaxis.models.interop.huggingface.namings import (
    DEEPSEEK_V2_NAMING,
    DEEPSEEK_V3_NAMING,
    GPT2_NAMING,
    LLAMA_NAMING,
    NEOX_NAMING,
    NORMS_AFTER,
    NORMS_BOTH,
    PHI3_NAMING,
    llama_naming,
    with_experts,
)

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
    naming: Naming = LLAMA_NAMING,
    rope: RopeKeys | None = None,
    without: Names = (),
    **others: Any,
) -> Family:
    """Build a family with Llama's keys and values, except the keys in `without`.

    The other arguments add to Llama's or replace some.
    """

    def kept(table: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in table.items() if key not in without}

    return Family(
        architecture,
        naming,
        {**kept(_LLAMA_NAMES), **(names or {})},
        {**_LLAMA_FIXED, **(fixed or {})},
        {**kept(_LLAMA_DEFAULTS), **(defaults or {})},
        rope=rope or _one_base(10000.0),
        **others,
    )


def _scalar(scale: float) -> float | None:
    """Find the integer whose inverse square root is the attention scale `scale`, or None."""
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
    "naming": llama_naming(NORMS_BOTH),
    "activation_key": "hidden_activation",
    "scale": ScaleKey("query_pre_attn_scalar", 256, lambda scalar: scalar**-0.5, _scalar),
    "computed": {"embedding_multiplier": ("hidden_size", math.sqrt)},
    "heads_divide_hidden": True,
}
_LATER_TOKENS = ((False, None), "attention to later tokens is not built: Triaxis trains decoders")


def _expert_keys(
    num_experts: Names,
    ffn_hidden_size: str,
    *,
    defaults: tuple[int | None, int | None, int | None],
    names: Mapping[str, tuple[str, object]] | None = None,
    **others: Any,
) -> ExpertKeys:
    """Build expert keys.

    Args:
        num_experts: spellings of the key for the number of experts.
        ffn_hidden_size: key for one expert's width.
        defaults: default number of experts, experts per token and width; None: the file must have that key.
        names: further keys -> (field of `model.moe`, default).
        others: other fields of the `ExpertKeys`.
    """
    sizes = {
        num_experts: ("num_experts", defaults[0]),
        ("num_experts_per_tok",): ("top_k", defaults[1]),
        (ffn_hidden_size,): ("ffn_hidden_size", defaults[2]),
    }
    return ExpertKeys(sizes | {(key,): value for key, value in (names or {}).items()}, **others)


def _deepseek(architecture: str, naming: Naming, experts: ExpertKeys, off: Mapping[str, Any], **others: Any) -> Family:
    """Build a family with latent attention, and experts after some dense layers."""
    absent = ("num_key_value_heads", "head_dim")
    return Family(
        architecture,
        naming,
        {theirs: ours for theirs, ours in _LLAMA_NAMES.items() if theirs not in absent},
        # In transformers, latent norms have their own epsilon, which no key sets.
        {**_LLAMA_FIXED, "norm_eps": 1e-6},
        {theirs: value for theirs, value in _LLAMA_DEFAULTS.items() if theirs not in absent},
        rope=_one_base(10000.0),
        off={
            "rope_interleave": ((True,), "RoPE whose pairs are no neighbours is not read for this family"),
            "rms_norm_eps": ((1e-6,), "norms of latents have the epsilon 1e-6, and here all norms have one"),
            "moe_layer_freq": ((1,), "transformers has experts in every layer behind the first ones"),
            **off,
        },
        latents={
            "q_lora_rank": ("q_lora_rank", 1536),
            "kv_lora_rank": ("kv_lora_rank", 512),
            "qk_nope_head_dim": ("qk_nope_head_dim", 128),
            "qk_rope_head_dim": ("qk_rope_head_dim", 64),
            "v_head_dim": ("v_head_dim", 128),
        },
        derived={
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
        unused=frozenset({"ep_size"}),
        experts=experts,
        further=("num_nextn_predict_layers", "num_mtp_layers"),
        **others,
    )


def _deepseek_experts(
    groups: tuple[int | None, int | None], sizes: tuple[int, int | None, int, int], scaling: float, **others: Any
) -> ExpertKeys:
    """Build DeepSeek's expert keys, whose defaults differ between versions.

    Args:
        groups: default number of expert groups, and default number of groups from which a token may choose.
        sizes: defaults for the number of experts, experts per token, expert width, and number of shared experts.
        scaling: default for the factor that multiplies the routed experts' output.
        others: other arguments for `_expert_keys`.
    """
    names = {
        "n_shared_experts": ("shared_experts", sizes[3]),
        "routed_scaling_factor": ("scaling", scaling),
        "n_group": ("groups", groups[0]),
        "topk_group": ("top_groups", groups[1]),
    }
    return _expert_keys(
        ("n_routed_experts",),
        "moe_intermediate_size",
        defaults=sizes[:3],
        names=names | others.pop("names", {}),
        has_shared=True,
        **others,
    )


FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        naming=GPT2_NAMING,
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
        naming=NEOX_NAMING,
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
        # Files written before transformers 5 have both spellings.
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
        # This family's published files leave out most keys that have a default.
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
        naming=llama_naming(NORMS_AFTER),
        fixed={"norm_placement": "after", "qk_norm": "all_heads"},
        defaults={"rms_norm_eps": 1e-5},
    ),
    "olmo3": _llama_like(
        "Olmo3ForCausalLM",
        naming=llama_naming(NORMS_AFTER),
        fixed={"norm_placement": "after", "qk_norm": "all_heads"},
        defaults={"rms_norm_eps": 1e-5},
        rope=RopeKeys({FULL: (("rope_theta",), 500000.0), SLIDING: (("rope_theta",), 500000.0)}),
        layers=LayerKeys("some", 4096, period=("", 4)),
    ),
    "phi3": _llama_like(
        "Phi3ForCausalLM",
        naming=PHI3_NAMING,
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
    "mixtral": _llama_like(
        "MixtralForCausalLM",
        without=("intermediate_size",),
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        naming=with_experts(LLAMA_NAMING, "block_sparse_moe", ("w1", "w3", "w2")),
        rope=_one_base(1e6),
        layers=LayerKeys("all"),
        experts=_expert_keys(
            ("num_local_experts",),
            "intermediate_size",
            defaults=(8, 2, 14336),
            fixed={"score": "softmax", "normalize": True},
        ),
        off={"router_jitter_noise": ((0.0, None), "noise on the input of routers in training is not built")},
    ),
    "qwen3_moe": _llama_like(
        "Qwen3MoeForCausalLM",
        fixed={"qk_norm": True},
        defaults={"num_key_value_heads": 4, "head_dim": None},
        naming=with_experts(LLAMA_NAMING),
        layers=LayerKeys("all", 4096, "use_sliding_window"),
        experts=_expert_keys(
            ("num_experts", "num_local_experts"),
            "moe_intermediate_size",
            defaults=(128, 8, 768),
            names={"norm_topk_prob": ("normalize", False)},
            fixed={"score": "softmax"},
            step=("decoder_sparse_step", 1),
            listed="mlp_only_layers",
        ),
    ),
    "olmoe": _llama_like(
        "OlmoeForCausalLM",
        without=("intermediate_size", "head_dim"),
        fixed={"qk_norm": "all_heads"},
        defaults={"rms_norm_eps": 1e-5},
        naming=with_experts(LLAMA_NAMING),
        experts=_expert_keys(
            ("num_experts",),
            "intermediate_size",
            defaults=(64, 8, 2048),
            names={"norm_topk_prob": ("normalize", False)},
            fixed={"score": "softmax"},
        ),
        off={"clip_qkv": ((None,), "queries, keys and values that are clipped are not built")},
    ),
    "deepseek_v3": _deepseek(
        "DeepseekV3ForCausalLM",
        DEEPSEEK_V3_NAMING,
        _deepseek_experts(
            (8, 4),
            (256, 8, 2048, 1),
            2.5,
            names={"norm_topk_prob": ("normalize", True)},
            fixed={"score": "sigmoid", "group_score": "top2"},
            has_bias=True,
            first=("first_k_dense_replace", 3),
        ),
        {
            "scoring_func": (("sigmoid", None), "transformers has sigmoid scores in this family"),
            "topk_method": (("noaux_tc", None), "transformers has groups by their best two experts in this family"),
        },
    ),
    "deepseek_v2": _deepseek(
        "DeepseekV2ForCausalLM",
        DEEPSEEK_V2_NAMING,
        _deepseek_experts(
            (None, None),
            (64, None, 1407, 2),
            1.0,
            fixed={"score": "softmax", "group_score": "max", "normalize": False},
            method=("topk_method", "greedy", "group_limited_greedy"),
            first=("first_k_dense_replace", 0),
        ),
        {
            "scoring_func": (("softmax", None), "transformers has softmax scores in this family"),
            "norm_topk_prob": (
                (False, None),
                "transformers divides by no sum in this family, DeepSeek's own code does",
            ),
        },
        heads_divide_hidden=True,
    ),
}
"""Families by `model_type`. An export uses the first one that can express the model, unless another is asked for."""
