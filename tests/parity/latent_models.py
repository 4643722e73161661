"""Small models with latent attention, in which no two sizes of a head or of a latent are equal."""

from typing import Any

SIZES = {"q_lora_rank": 10, "kv_lora_rank": 6, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 3}
DEEPSEEK: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 8,
    "mla": SIZES,
    "ffn_hidden_size": 24,
    "seq_length": 8,
    "vocab_size": 43,
    "vocab_multiple": 8,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": "none",
    "tie_embeddings": False,
    "rope_base": 50.0,
}
MSCALE = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "mscale": 0.5,
    "mscale_all_dim": 0.7,
}
LATENTS: dict[str, dict[str, Any]] = {
    "mla": DEEPSEEK,
    "mla, queries from x": DEEPSEEK | {"mla": SIZES | {"q_lora_rank": None}},
    "mla, mscale": DEEPSEEK | {"rope_scaling": MSCALE},
    "mla, kinds": DEEPSEEK
    | {
        "layers": ["near", "far", "free"],
        "layer_kinds": {
            "near": {"window": 3, "sinks": True},
            "far": {"rope_scaling": MSCALE},
            "free": {"position": "none", "window": 5},
        },
        "norm": "rmsnorm_1p",
        "num_layers": 3,
    },
    "mla, dropout": DEEPSEEK | {"attention_dropout": 0.3, "hidden_dropout": 0.2, "attention_softcap": 0.8},
    "mla, values as large as keys": DEEPSEEK | {"mla": SIZES | {"v_head_dim": 9}, "attention_scale": 0.4},
}
