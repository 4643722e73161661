"""Configurations of small models of every family, for transformers to build."""

from typing import Any

LENGTH = 16

_LLAMA: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 43,
    "max_position_embeddings": LENGTH,
    "rope_theta": 500.0,
}
_GPT2: dict[str, Any] = {
    "n_embd": 24,
    "n_layer": 3,
    "n_head": 4,
    "vocab_size": 43,
    "n_positions": LENGTH,
    "bos_token_id": None,
    "eos_token_id": None,
}
_NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_NEOX: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 43,
    "max_position_embeddings": LENGTH,
    "rotary_pct": 0.5,
}
_GEMMA: dict[str, Any] = {key: value for key, value in _LLAMA.items() if key != "rope_theta"} | {
    "head_dim": 8,
    # A square: the root is the same number in fp32, in which transformers keeps it.
    "hidden_size": 36,
}
_PHI3: dict[str, Any] = _NO_IDS
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", **_GPT2},
    "gpt2_untied_gelu": {
        "model_type": "gpt2",
        **_GPT2,
        "tie_word_embeddings": False,
        "activation_function": "gelu",
        "n_inner": 40,
    },
    "llama": {"model_type": "llama", **_LLAMA},
    "llama_exact_geglu": {"model_type": "llama", **_LLAMA, "hidden_act": "gelu"},
    "llama_geglu": {"model_type": "llama", **_LLAMA, "hidden_act": "gelu_pytorch_tanh"},
    "llama_tied_mha": {"model_type": "llama", **_LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "llama_wide_heads_mqa": {"model_type": "llama", **_LLAMA, "num_key_value_heads": 1, "head_dim": 10},
    "mistral": {"model_type": "mistral", **_LLAMA, "sliding_window": None},
    "mistral_odd_width": {
        "model_type": "mistral",
        **_LLAMA,
        "hidden_size": 30,
        "head_dim": 8,
        "sliding_window": LENGTH,
    },
    "qwen2": {"model_type": "qwen2", **_LLAMA},
    "qwen2_tied": {"model_type": "qwen2", **_LLAMA, "tie_word_embeddings": True, "head_dim": 8},
    "llama_llama3": {
        "model_type": "llama",
        **_LLAMA,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 24,
        },
    },
    "llama_linear": {
        "model_type": "llama",
        **_LLAMA,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    },
    "mistral_window": {"model_type": "mistral", **_LLAMA, "head_dim": 6, "sliding_window": 5},
    "qwen2_yarn_windows": {
        "model_type": "qwen2",
        **_LLAMA,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    },
    "qwen3_window_first": {
        "model_type": "qwen3",
        **_LLAMA,
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt_neox": {"model_type": "gpt_neox", **_NEOX},
    "gpt_neox_sequential_tied": {
        "model_type": "gpt_neox",
        **_NEOX,
        "use_parallel_residual": False,
        "rotary_pct": 1.0,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_new",
    },
    "gemma2": {"model_type": "gemma2", **_GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 12},
    "gemma2_without_caps_untied": {
        "model_type": "gemma2",
        **_GEMMA,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 3,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        **_GEMMA,
        "num_hidden_layers": 7,
        "sliding_window": 4,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 700.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "gemma3_all_full": {"model_type": "gemma3_text", **_GEMMA, "layer_types": ["full_attention"] * 3},
    "olmo2": {"model_type": "olmo2", **_LLAMA, "num_key_value_heads": 4},
    "olmo2_gqa_tied": {"model_type": "olmo2", **_LLAMA, "tie_word_embeddings": True},
    "olmo3": {
        "model_type": "olmo3",
        **_LLAMA,
        "num_hidden_layers": 4,
        "sliding_window": 5,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 600.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8,
                "attention_factor": 1.2,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 600.0},
        },
    },
    "olmo3_two_bases": {
        "model_type": "olmo3",
        **_LLAMA,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 600.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
        },
    },
    "phi3": {"model_type": "phi3", **_LLAMA, **_PHI3},
    "phi3_part_of_a_head_window": {
        "model_type": "phi3",
        **_LLAMA,
        **_PHI3,
        "hidden_size": 32,
        "partial_rotary_factor": 0.75,
        "sliding_window": 5,
        "tie_word_embeddings": True,
    },
    "phi3_longrope": {
        "model_type": "phi3",
        **_LLAMA,
        **_PHI3,
        "original_max_position_embeddings": 8,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 5.0]},
    },
    "smollm3": {"model_type": "smollm3", **_LLAMA, **_NO_IDS, "num_hidden_layers": 5},
    "smollm3_windows": {
        "model_type": "smollm3",
        **_LLAMA,
        **_NO_IDS,
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 4,
        "tie_word_embeddings": False,
    },
    "granite": {
        "model_type": "granite",
        **_LLAMA,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "attention_multiplier": 0.3,
    },
    "granite_plain_tied": {"model_type": "granite", **_LLAMA, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_LLAMA, "head_dim": 8},
    "qwen3_tied": {"model_type": "qwen3", **_LLAMA, "head_dim": 8, "tie_word_embeddings": True},
}
