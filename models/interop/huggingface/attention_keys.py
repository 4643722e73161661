"""RoPE and windows in a Hugging Face config.json: our fields of attention, and the reverse (no torch here).

rope_theta, rope_scaling | rope_parameters                             <->  rope_base, rope_scaling
sliding_window, use_sliding_window, layer_types, max_window_layers     <->  window, or layers and layer_kinds
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import groupby
from typing import Any

from engine.config.model import ModelConfig

Keys = Mapping[str, Any]

MISTRAL_WINDOW = 4096
"""The sliding window of a Mistral whose file does not name one; null in the file is none."""

QWEN_WINDOW, QWEN_FIRST_WINDOW = 4096, 28
"""The same of a Qwen, and the first layer that has it, where `use_sliding_window` switches windows on."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""Names in `layer_types`, and of our kinds of layers."""


def with_rope_parameters(keys: Keys) -> tuple[Keys, dict[str, Any] | None, list[str]]:
    """Return the keys with one `rope_theta`, our `rope_scaling`, and problems.

    transformers 5 writes {"rope_parameters": {"rope_theta": ..., "rope_type": ..., ...}}; before it, `rope_theta` stood by itself,
    and `rope_scaling` had the rest ("type" in place of "rope_type" in old files). A type "default" scales nothing.
    """
    rope_theta: dict[str, object] = {"rope_theta": keys["rope_theta"]} if "rope_theta" in keys else {}
    problems: list[str] = []
    scalings = []
    for key in ("rope_parameters", "rope_scaling"):
        rope = keys.get(key)
        if not isinstance(rope, Mapping):
            continue
        if rope.get("rope_theta", rope_theta.get("rope_theta")) != rope_theta.get("rope_theta", rope.get("rope_theta")):
            problems.append(
                f"{key} has rope_theta = {rope['rope_theta']!r}, and elsewhere it is {rope_theta['rope_theta']!r}: which one the "
                f"model was trained with would be a guess. Remove one of them."
            )
        elif "rope_theta" in rope:
            rope_theta = {"rope_theta": rope["rope_theta"]}
        fields = {name: value for name, value in rope.items() if name not in ("rope_type", "type", "rope_theta")}
        scaling = {"type": rope.get("rope_type", rope.get("type", "default")), **fields}
        scaling = _without_whole_heads(scaling)
        if scaling["type"] != "default":
            scalings.append(_completed(scaling, keys))
        elif len(scaling) > 1:
            problems.append(
                f"{key} = {dict(rope)!r}: RoPE of this form is not built yet; the model would be another one."
            )
    if any(scaling != scalings[0] for scaling in scalings):
        problems.append(
            "rope_parameters and rope_scaling differ: which of them the model has would be a guess. Remove one."
        )
    seen = {key: value for key, value in keys.items() if not (key.startswith("rope_") and isinstance(value, Mapping))}
    return {**seen, **rope_theta}, scalings[0] if scalings else None, problems


def _without_whole_heads(scaling: dict[str, Any]) -> dict[str, Any]:
    """Return the fields without a `partial_rotary_factor` of 1, which changes nothing."""
    return {name: value for name, value in scaling.items() if (name, value) != ("partial_rotary_factor", 1.0)}


def _completed(scaling: dict[str, Any], keys: Keys) -> dict[str, Any]:
    """Return the fields with those that transformers takes from elsewhere in the file (modeling_rope_utils.py)."""
    longest = keys.get("max_position_embeddings")
    if scaling["type"] in ("yarn", "longrope"):
        original = keys.get("original_max_position_embeddings", longest)
        scaling = {"original_max_position_embeddings": original, **scaling}
    if scaling["type"] == "longrope" and "factor" not in scaling and isinstance(longest, int):
        scaling["factor"] = longest / scaling["original_max_position_embeddings"]
    return {name: value for name, value in scaling.items() if value is not None}


def read_windows(keys: Keys, attention: Collection[str], model: dict[str, Any]) -> Iterator[str]:
    """Write the windows of the layers to `model`, and yield problems; `attention` has the fields of the family.

    A Mistral has one on every layer; a Qwen where `layer_types` says so, or from `max_window_layers` on, and a key of its own
    switches them. transformers lets a query see the keys > q - sliding_window, as here.
    """
    is_mistral = keys["model_type"] == "mistral"
    window = keys.get("sliding_window", MISTRAL_WINDOW if is_mistral else QWEN_WINDOW)
    types = keys.get("layer_types")
    if unknown := sorted(set(types or ()) - {FULL, SLIDING}):
        yield f"layer_types = {', '.join(unknown)}: only {FULL} and {SLIDING} are built."
        return
    if window is None or not keys.get("use_sliding_window", is_mistral):
        if SLIDING in (types or ()):
            yield f"layer_types has {SLIDING}, and use_sliding_window or sliding_window switches it off. Remove one of them."
        return
    if is_mistral:
        types = types or [SLIDING] * model["num_layers"]
    elif types is None:
        first = keys.get("max_window_layers", QWEN_FIRST_WINDOW)
        types = [FULL if layer < first else SLIDING for layer in range(model["num_layers"])]
    if "window" not in attention or len(types) != model["num_layers"]:
        yield (
            f"{len(types)} layer_types with sliding_window = {window}: no {keys['model_type']} of {model['num_layers']} layers has "
            "these; the model would be another one."
        )
    elif set(types) == {SLIDING}:
        model["window"] = window
    elif SLIDING in types:
        model["layers"] = [f"{name}*{len(list(run))}" for name, run in groupby(types)]
        model["layer_kinds"] = {FULL: {}, SLIDING: {"window": window}}


def unknown_kinds(model: ModelConfig) -> Iterator[str]:
    """List the kinds of layers that are no full attention and no window of one length."""
    for name, kind in model.layer_kinds.items():
        if others := sorted(set(kind) - {"window"}):
            yield f"model.layer_kinds.{name} has {', '.join(others)}, which no layer of it has on its own"
    if len(windows := {kind.window for kind in model.kinds if kind.window is not None}) > 1:
        yield f"windows of {', '.join(map(str, sorted(windows)))} keys, there all have one length"


def window_keys(model: ModelConfig, attention: Collection[str]) -> Iterator[tuple[str, object]]:
    """Yield the keys that give a family's layers their windows, also where none has one."""
    if "window" not in attention:
        return
    windows = [kind.window for kind in model.kinds]
    window = next((each for each in windows if each is not None), None)
    yield "sliding_window", window
    if "layers" in attention:
        yield "use_sliding_window", window is not None
        if window is not None:
            types = [FULL if each is None else SLIDING for each in windows]
            yield "layer_types", types
            # Read by releases of transformers that do not know `layer_types`.
            yield "max_window_layers", types.index(SLIDING)
