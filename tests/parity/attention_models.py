"""Options of attention for the parity tests: what each changes in a small Llama."""

from typing import Any

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0}
_LLAMA3 = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONGROPE = {
    "type": "longrope",
    "factor": 2.0,
    "original_max_position_embeddings": 4,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 3.0, 7.0],
}
ATTENTION: dict[str, dict[str, Any]] = {
    "window": {"window": 3},
    "window of one": {"window": 1},
    "sinks": {"sinks": True},
    "scale": {"attention_scale": 0.9},
    "softcap": {"attention_softcap": 0.7},
    "share": {"rotary_share": 0.7},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama3": {"rope_scaling": _LLAMA3},
    "yarn": {"rope_scaling": YARN},
    "longrope": {"rope_scaling": _LONGROPE},
    "longrope, short samples": {"rope_scaling": _LONGROPE | {"original_max_position_embeddings": 100}},
    "no positions": {"position": "none"},
    "every third without": {
        "num_layers": 3,
        "layers": ["turned*2", "free"],
        "layer_kinds": {"turned": {}, "free": {"position": "none"}},
    },
}
"""Each option alone."""
