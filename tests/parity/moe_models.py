"""Models with experts for the parity tests: what each changes in a small Llama."""

from typing import Any

_MIXTRAL = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}
_BALANCE = {"bias_rate": 0.05, "sequence_loss": 0.3, "z_loss": 0.02}
_DEEPSEEK = {
    "num_experts": 8,
    "top_k": 3,
    "ffn_hidden_size": 8,
    "shared_experts": 2,
    "score": "sigmoid",
    "scaling": 1.7,
    "groups": 4,
    "top_groups": 2,
    "balance": _BALANCE,
}

EXPERTS: dict[str, dict[str, Any]] = {
    "moe": {"layers": ["moe"], "moe": _MIXTRAL},
    "moe not normalised": {"layers": ["moe"], "moe": _MIXTRAL | {"normalize": False, "scaling": 0.6}},
    "moe losses": {"layers": ["dense", "moe"], "moe": _MIXTRAL | {"balance": _BALANCE}},
    "moe sigmoid": {"layers": ["moe"], "moe": _MIXTRAL | {"score": "sigmoid", "balance": _BALANCE}},
    "moe groups": {
        "layers": ["moe"],
        "moe": _MIXTRAL | {"num_experts": 8, "groups": 4, "top_groups": 2, "group_score": "max", "normalize": False},
    },
    "moe one of many": {"layers": ["moe"], "moe": _MIXTRAL | {"num_experts": 16, "top_k": 1, "normalize": False}},
    "moe biased": {"layers": ["moe"], "moe": _MIXTRAL | {"choice_bias": True}},
    "moe one biased": {"layers": ["moe"], "moe": _MIXTRAL | {"choice_bias": True, "top_k": 1, "normalize": False}},
    "moe all": {"layers": ["moe"], "moe": _MIXTRAL | {"top_k": 4}},
    "moe gelu": {"layers": ["moe"], "moe": _MIXTRAL | {"shared_experts": 1}, "activation": "gelu"},
    "moe in turn": {"layers": ["moe"], "moe": _MIXTRAL | {"force_balanced": True}},
    "moe counted by choices": {
        "layers": ["moe"],
        "moe": _DEEPSEEK | {"balance": _BALANCE | {"sequence_counts": "choices"}},
    },
    "deepseek": {"layers": ["dense", "moe*3"], "moe": _DEEPSEEK, "num_layers": 4},
}
"""Each form of routing alone, and all of them together."""
