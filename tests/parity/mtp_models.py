"""Models with multi-token prediction for the parity tests."""

from typing import Any

from tests.parity.latent_models import DEEPSEEK
from tests.parity.moe_models import EXPERTS

_LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 8,
    "num_kv_heads": 2,
    "ffn_hidden_size": 40,
    "seq_length": 8,
    "vocab_size": 43,
    "vocab_multiple": 8,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": "none",
    "tie_embeddings": False,
}
_TWO = {"mtp": {"num_layers": 2, "loss_weight": 0.7}}

AHEAD: dict[str, dict[str, Any]] = {
    "ahead": _LLAMA | {"mtp": {}},
    "ahead two": _LLAMA | _TWO,
    "ahead tied": _LLAMA | _TWO | {"tie_embeddings": True, "norm": "layernorm", "bias": "all", "activation": "gelu"},
    "ahead shaped": _LLAMA
    | _TWO
    | {
        "logit_softcap": 0.9,
        "z_loss": 0.1,
        "embedding_multiplier": 1.5,
        "norm_placement": "both",
        "layers": ["near", "far"],
        "layer_kinds": {"near": {"window": 3}, "far": {"rope_base": 100.0, "sinks": True}},
    },
    "ahead dropout": _LLAMA | _TWO | {"hidden_dropout": 0.2, "attention_dropout": 0.3},
    "ahead deepseek": DEEPSEEK | _TWO | EXPERTS["deepseek"],
}
