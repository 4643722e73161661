"""Options of a transformer block, as what each changes in the small Llama of `cases.py`."""

from typing import Any

BLOCKS: dict[str, dict[str, Any]] = {
    "exact gelu gate": {"activation": "geglu"},
    "squared relu": {"activation": "relu2"},
    "norm 1p": {"norm": "rmsnorm_1p"},
    "norm 1p, also of heads": {"norm": "rmsnorm_1p", "qk_norm": True},
    "norm of heads": {"qk_norm": "head"},
    "norm of all heads": {"qk_norm": "all_heads"},
    "norm 1p of all heads": {"qk_norm": "all_heads", "norm": "rmsnorm_1p"},
    "norms after": {"norm_placement": "after"},
    "norms before and after": {"norm_placement": "both"},
    "parallel": {"parallel_block": True},
    "parallel, norms after": {"parallel_block": True, "norm_placement": "after"},
    "embedding multiplier": {"embedding_multiplier": 3.3},
    "residual multiplier": {"residual_multiplier": 0.22},
    "logit divisor": {"logit_divisor": 6.0},
    "logit softcap": {"logit_softcap": 1.5},
    "parallel gpt": {"parallel_block": True, "norm": "layernorm", "bias": "all", "position": "learned"},
    "multipliers, dropout": {"residual_multiplier": 0.3, "embedding_multiplier": 2.5, "hidden_dropout": 0.2},
}
"""Each option of a block alone, as what it changes in a small Llama."""

TOGETHER: dict[str, dict[str, Any]] = {
    "olmo2": {"norm_placement": "after", "qk_norm": "all_heads", "z_loss": 0.02, "num_layers": 4},
    "gemma2": {
        "norm": "rmsnorm_1p",
        "norm_placement": "both",
        "activation": "geglu_tanh",
        "qk_norm": True,
        "embedding_multiplier": 4.0,
        "logit_softcap": 2.0,
        "tie_embeddings": True,
        "num_layers": 4,
    },
    "neox": {
        "parallel_block": True,
        "norm": "layernorm",
        "activation": "gelu",
        "bias": "all",
        "num_kv_heads": None,
        "hidden_dropout": 0.2,
        "num_layers": 4,
    },
    "granite": {
        "residual_multiplier": 0.22,
        "embedding_multiplier": 12.0,
        "logit_divisor": 6.0,
        "num_layers": 4,
    },
}
"""Options of a block together, in the ways of four families."""
