"""The models of the parity tests: tiny, but not simple.

Head counts, widths and vocabulary leave padding, replicated key/value heads and buckets that do not divide.
"""

from typing import Any

from tests.parity.attention_models import ATTENTION, YARN
from tests.parity.block_models import BLOCKS, TOGETHER
from tests.parity.latent_models import LATENTS
from tests.parity.moe_models import EXPERTS
from tests.parity.mtp_models import AHEAD

BASE: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 16,
    "num_attention_heads": 8,
    "seq_length": 8,
    "vocab_size": 43,
    "vocab_multiple": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {**BASE, "ffn_hidden_size": 24, "position": "learned"},
    "gpt_untied": {
        **BASE,
        "ffn_hidden_size": 24,
        "position": "learned",
        "tie_embeddings": False,
        "activation": "gelu_tanh",
    },
    "llama": {
        **BASE,
        "num_kv_heads": 2,
        "ffn_hidden_size": 40,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": "none",
        "tie_embeddings": False,
    },
    "geglu": {**BASE, "ffn_hidden_size": 40, "norm": "rmsnorm", "activation": "geglu_tanh"},
    "qwen": {
        **BASE,
        "num_kv_heads": 4,
        "head_dim": 4,
        "ffn_hidden_size": 24,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": "qkv",
        "qk_norm": True,
    },
    "gpt_dropout": {
        **BASE,
        "ffn_hidden_size": 24,
        "position": "learned",
        "hidden_dropout": 0.2,
        "attention_dropout": 0.3,
    },
    # Of these every side of a matrix on one of two tp ranks is a block of numbers with one FP8 scale, or two.
    "blocks_of_32": {
        **BASE,
        "num_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 32,
        "num_kv_heads": 2,
        "ffn_hidden_size": 64,
        "seq_length": 64,
        "norm": "rmsnorm",
        "activation": "swiglu",
    },
    "blocks_of_128": {
        **BASE,
        "num_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "head_dim": 128,
        "ffn_hidden_size": 256,
        "seq_length": 128,
        "position": "learned",
    },
    # The same of experts beside a dense layer, and of the MLP that they share.
    "experts_of_128": {
        **BASE,
        "num_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "head_dim": 64,
        "ffn_hidden_size": 128,
        "seq_length": 128,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": "none",
        "layers": ["dense", "moe"],
        "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 64, "shared_experts": 2},
    },
    "mqa_rope_bias": {**BASE, "num_kv_heads": 1, "ffn_hidden_size": 24, "bias": "all", "tie_embeddings": True},
}

_ROPE = {**MODELS["llama"], "head_dim": 6, "num_layers": 2, "rope_base": 50.0}
for option, fields in (ATTENTION | BLOCKS | TOGETHER | EXPERTS).items():
    MODELS[option] = _ROPE | fields
MODELS |= LATENTS | AHEAD
DOCUMENTS = {
    "synthetic_document_length": 3,
    "attention": "within",
    "positions": "document",
    "count_document_starts": False,
}
"""The data section of a case with documents."""

MODELS["plain"] = _ROPE | {"window": 8}
MODELS["kinds"] = _ROPE | {
    "layers": ["near*2", "far", "free"],
    "layer_kinds": {
        "near": {"window": 3, "sinks": True},
        "far": {"rope_base": 1000.0, "rope_scaling": YARN, "rotary_share": 0.7},
        "free": {"position": "none", "window": 5},
    },
    "attention_scale": 0.6,
    "num_layers": 8,
}
MODELS["kinds_tied"] = {
    **MODELS["gpt"],
    "layers": ["near", "far"],
    "layer_kinds": {"near": {"window": 2}, "far": {"sinks": True}},
}
MODELS["kinds_capped"] = MODELS["kinds"] | {"attention_softcap": 0.8, "qk_norm": True, "num_kv_heads": 1}
MODELS["kinds_dropout"] = MODELS["kinds"] | {"attention_dropout": 0.3, "attention_softcap": 0.8}
"""Kinds of layers together, with learned positions and a tied head, a cap, dropout on the probabilities."""

WIDE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "seq_length": 64,
    "vocab_size": 200,
}
"""Sizes at which rounding errors of a tensor average out, so that their norm says something."""
MODELS["gpt_large_head"] = {**MODELS["gpt"], "vocab_size": 500}
"""A head with more work than a layer."""
for name in ("gpt", "llama", "qwen"):
    MODELS[f"{name}_wide"] = {**MODELS[name], **WIDE, "ffn_hidden_size": 256, "head_dim": 16}
