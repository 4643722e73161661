"""Accept unknown config.json keys that agree with the model or have no effect.

The columns give an example, what such a key says, and when it is accepted:

    max_sequence_length = 2048     another name for a value in the file              if the values are equal
    lm_head_bias = false           whether a layer has a bias                        if that is true of the model
    interpolate_factor = 1         a factor, a dropout, a period of layers           if it has no effect: 1, 0, 1
    internal_version = 7b-v2.33    a note on the file                                always, since no layer reads it

A key is classified by its last word. All other keys are refused.
"""

from collections.abc import Mapping
from typing import Any

from triaxis.engine.config.names.foreign_names import our_name
from triaxis.engine.config.schema.dotted import get_field

_NEUTRAL: Mapping[str, float] = {
    **dict.fromkeys(("factor", "multiplier", "scale", "divisor"), 1),
    **dict.fromkeys(("dropout", "pdrop", "noise"), 0),
}
"""Last word of a key -> value that has no effect."""

_EACH_LAYER = ("mod", "interval", "period", "freq", "frequency")
"""Last words of keys that give a period p: every p-th layer has some feature. With p = 1, all layers have it."""


_TOOLS = ("unsloth",)
"""First words of keys that training tools write for their own use."""


def is_note(key: str) -> bool:
    """Whether no layer reads the key: a version, a training tool's key, or no Python identifier."""
    return not key.isidentifier() or key.split("_")[-1] == "version" or key.split("_")[0] in _TOOLS


def agrees(key: str, value: object, model: Mapping[str, Any]) -> bool:
    """Whether a config.json key agrees with the model or has no effect (see the module).

    Args:
        model: our `model` section as read so far.
    """
    part, _, last = key.rpartition("_")
    if isinstance(value, bool) and last == "bias":
        return value is _has_bias(part, model["bias"])
    name = our_name(key) or ""
    if name.startswith("model.") and (known := get_field({"model": model}, name)) is not None:
        return type(value) is type(known) and value in (known, *_scaled(name, known, model))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if last in _EACH_LAYER:
        return value == 1 and not model.get("layers")
    return value == _NEUTRAL.get(last)


def _scaled(name: str, known: Any, model: Mapping[str, Any]) -> list[float]:
    """List values that agree with our field `name`, besides its own value `known`.

    For `model.seq_length` with linear RoPE scaling: sample length x scaling factor. Otherwise none.
    """
    scaling = model.get("rope_scaling")
    is_before = name == "model.seq_length" and isinstance(scaling, Mapping) and scaling.get("type") == "linear"
    return [known * scaling["factor"]] if is_before and scaling is not None else []


def _has_bias(part: str, bias: str) -> bool | None:
    """Whether a part, such as `attention`, has biases if `bias` is the value of `model.bias`; None: unclear."""
    if "head" in part or bias != "qkv":
        return bias == "all" and "head" not in part
    return True if any(word in part for word in ("att", "qkv", "q_proj", "k_proj", "v_proj")) else None
