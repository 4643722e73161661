"""Choose the attention settings of a smaller model of the same kind.

For each kind of layer, these properties are kept:

- whether the window is shorter than the samples
- whether only part of a head rotates
- the rule that scales frequencies
- whether samples are longer than LongRoPE's original length
"""

from collections.abc import Mapping
from typing import Any

from triaxis.engine.config.schema.layer_kinds import RopeScaling
from triaxis.engine.config.schema.model import ModelConfig

PART = 0.5
"""Rotated share of a small model's heads, if only part of a head rotates in the original."""


def shrink_attention(model: ModelConfig, seq_length: int, head_dim: int) -> dict[str, Any]:
    """Compute the changes to the `model` section for samples of `seq_length` and heads of `head_dim`."""
    own = {name: getattr(model, name) for name in ("window", "rotary_share", "rope_scaling")}
    changes = _fields(own, model, seq_length, head_dim, own["rotary_share"])
    if model.layers is not None:
        changes["layer_kinds"] = {
            name: {**kind, **_fields(kind, model, seq_length, head_dim, kind.get("rotary_share", model.rotary_share))}
            for name, kind in model.layer_kinds.items()
        }
    return changes


def _fields(
    given: Mapping[str, Any], model: ModelConfig, seq_length: int, head_dim: int, share: float
) -> dict[str, Any]:
    """Compute new values for the size-dependent fields in `given`, as JSON.

    `given` has the fields of a layer kind or of the model.
    """
    found: dict[str, Any] = {}
    if "window" in given:
        window = given["window"]
        if window is not None:
            window = max(1, seq_length // 3) if window < model.seq_length else max(window, seq_length)
        found["window"] = window
    if "rotary_share" in given:
        found["rotary_share"] = PART if share < 1 else 1.0
    if "rope_scaling" in given:
        pairs = int(head_dim * (PART if share < 1 else 1.0)) // 2
        found["rope_scaling"] = _scaling(given["rope_scaling"], model, seq_length, pairs)
    return found


def _scaling(scaling: RopeScaling | None, model: ModelConfig, seq_length: int, pairs: int) -> dict[str, Any] | None:
    if scaling is None:
        return None
    fields = scaling.model_dump(mode="json", exclude_defaults=True)
    original = scaling.original_max_position_embeddings
    if scaling.type == "longrope" and original is not None:
        fields["original_max_position_embeddings"] = seq_length // 2 if model.seq_length > original else seq_length
        for name in ("short_factor", "long_factor"):
            fields[name] = fields[name][:pairs]
    return fields
