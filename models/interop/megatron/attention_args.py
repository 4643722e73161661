"""Map Megatron-LM's attention arguments to our attention fields, and back.

Their arguments are on the left, our `model` fields on the right:

    rotary_percent                                 <->  rotary_share
    rotary_seq_len_interpolation_factor            <->  rope_scaling linear
    use_rope_scaling, rope_scaling_factor          <->  rope_scaling llama3 with Llama 3.1's lengths and bounds
    window_size (left, 0), window_attn_skip_freq   <->  window = left + 1, on all layers or by layer kind
    no_rope_freq                                   <->  layer kinds with position none
    softmax_scale, softmax_type learnable          <->  attention_scale, sinks

Sources: TransformerConfig, `is_layer_window_attention`, `get_sliding_window_causal_mask` and RotaryEmbedding in Megatron-Core 0.16.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.errors import shown

Args = Mapping[str, Any]

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of Llama 3's RoPE scaling in Megatron-Core's `RotaryEmbedding._apply_scaling`; only the factor is an argument."""

LISTS_BY_LAYER = ("window_attn_skip_freq", "no_rope_freq")
"""Arguments that are one flag per layer, or a period in layers."""

LISTS = ("window_size", *LISTS_BY_LAYER)
"""Arguments that may be lists or tuples of integers."""

FIELDS = frozenset({"rotary_share", "rope_scaling", "window", "layers", "layer_kinds", "attention_scale", "sinks"})
"""Our `model` fields that these arguments can express, unless `attention_differences` reports a difference."""


def read_attention(args: Args, model: dict[str, Any]) -> list[str]:
    """Add attention fields to `model`, and return problems. `model` must already have `num_layers` and `position`."""
    problems = [
        f"{name} = {shown(args[name])}: must be a number or a list of numbers; Megatron-LM writes no other."
        for name in LISTS
        if args.get(name) is not None and not _is_numbers(args[name])
    ]
    if problems:
        return problems
    num_layers = model["num_layers"]
    if model["position"] == "rope":
        problems += _read_rope(args, model)
    model["attention_scale"] = args.get("softmax_scale")
    kind = args.get("softmax_type") or "vanilla"
    if kind == "learnable":
        model["sinks"] = True
    elif kind != "vanilla":
        problems.append(
            f"softmax_type = {shown(kind)}: only vanilla and learnable are built; the model would be another one."
        )
    window, more = _read_window(args)
    by_layer = [
        _each_layer(args.get(name), num_layers, default)
        for name, default in (("window_attn_skip_freq", 0), ("no_rope_freq", 1))
    ]
    problems += more
    for name, pattern in zip(LISTS_BY_LAYER, by_layer, strict=True):
        if pattern is None:
            problems.append(
                f"{name} = {shown(args[name])}: must have an entry for each of {num_layers} layers, or be a divisor of it."
            )
    windows, still = by_layer
    if problems or windows is None or still is None:
        return problems
    has_window = [window is not None and bool(flag) for flag in windows]
    _write_layers(model, window, has_window, [bool(flag) and model["position"] == "rope" for flag in still])
    return problems


def _read_rope(args: Args, model: dict[str, Any]) -> Iterator[str]:
    share = args.get("rotary_percent")
    if share is not None and share != 1:
        model["rotary_share"] = share
    factor = args.get("rotary_seq_len_interpolation_factor")
    if args.get("use_rope_scaling"):
        model["rope_scaling"] = {"type": "llama3", "factor": args.get("rope_scaling_factor", 8.0), **LLAMA3}
        if factor not in (None, 1):
            yield "use_rope_scaling with rotary_seq_len_interpolation_factor: two scalings of one RoPE are not built."
    elif factor not in (None, 1):
        model["rope_scaling"] = {"type": "linear", "factor": factor}


def _read_window(args: Args) -> tuple[int | None, list[str]]:
    """Read the window, as the number of keys that a query sees, and list problems.

    The number is None if there is no window, which Megatron-LM writes as None or (-1, 0).
    """
    given = args.get("window_size")
    if given is None:
        return None, []
    if not (isinstance(given, list | tuple) and len(given) == 2 and given[1] in (0, -1)):
        return None, [f"window_size = {shown(given)}: must be (keys before the query, 0); queries see no later key."]
    return (None if given[0] < 0 else given[0] + 1), []


def _each_layer(given: Any, num_layers: int, last: int) -> list[int] | None:
    """Expand a list or number to one flag per layer.

    A list is returned as it is. A number n gives every n-th layer the flag `last` (0 or 1), and all other layers 1 - `last`. None
    or 0 gives every layer 1 - `last`. The result is None if a list has the wrong length, or if `last` is 1 and n does not divide
    the number of layers.
    """
    if given is None or given == 0:
        return [1 - last] * num_layers
    if isinstance(given, list | tuple):
        return list(given) if len(given) == num_layers else None
    if last and num_layers % given:
        return None
    return [last if (layer + 1) % given == 0 else 1 - last for layer in range(num_layers)]


def _write_layers(model: dict[str, Any], window: int | None, has_window: list[bool], still: list[bool]) -> None:
    """Add each layer's window and RoPE choice to `model`, as layer kinds if layers differ.

    `has_window` marks the layers with the window, `still` those without RoPE.
    """
    kinds: dict[str, dict[str, Any]] = {}
    names = []
    for windowed, is_still in zip(has_window, still, strict=True):
        name = ("near" if windowed else "far") + ("_no_rope" if is_still else "")
        kinds[name] = ({"window": window} if windowed else {}) | ({"position": "none"} if is_still else {})
        names.append(name)
    if len(kinds) == 1:
        model |= kinds[names[0]]
    else:
        model["layers"] = [f"{name}*{len(list(run))}" for name, run in groupby(names)]
        model["layer_kinds"] = kinds


def attention_differences(model: ModelConfig) -> Iterator[str]:
    """Yield a sentence for each attention feature that Megatron-LM's arguments lack."""
    kinds = model.kinds
    if model.mtp is not None and len({(kind.window, kind.rotary, kind.sinks) for kind in kinds}) > 1:
        yield "model.mtp with layers that differ: Megatron-LM's lists of windows and positions have no entry for mtp layers."
    if len(windows := {kind.window for kind in kinds if kind.window is not None}) > 1:
        yield f"windows of {', '.join(map(str, sorted(windows)))} keys: Megatron-LM has one length for all layers."
    rotaries = {kind.rotary for kind in kinds if kind.rotary is not None}
    if len(rotaries) > 1:
        yield "layers that rotate in different ways: Megatron-LM has one RoPE for all layers that rotate."
    if len({kind.sinks for kind in kinds}) > 1:
        yield "sinks on some layers: Megatron-LM has them on all layers or none."
    scaling = next((rotary.scaling for rotary in rotaries), None)
    if scaling is None or scaling.type == "linear":
        return
    if scaling.type != "llama3":
        yield f"model.rope_scaling.type = {scaling.type}: an exchange of it with Megatron-LM is not built."
    elif any(getattr(scaling, name) != value for name, value in LLAMA3.items()):
        constants = ", ".join(f"{name} = {value:g}" for name, value in LLAMA3.items())
        yield f"model.rope_scaling of type llama3: Megatron-LM has {constants}, and no argument for others."


def attention_args(model: ModelConfig) -> dict[str, Any]:
    """Build Megatron-LM's attention arguments. `attention_differences` must yield nothing for the model."""
    kinds = model.kinds[: model.num_layers]
    rotary = next((kind.rotary for kind in kinds if kind.rotary is not None), None)
    scaling = None if rotary is None else rotary.scaling
    is_linear, is_llama3 = (scaling is not None and scaling.type == each for each in ("linear", "llama3"))
    window = next((kind.window for kind in kinds if kind.window is not None), None)
    windowed, still = [kind.window is not None for kind in kinds], [kind.rotary is None for kind in kinds]
    has_still = rotary is not None and any(still)
    return {
        "rotary_base": model.rope_base if rotary is None else rotary.base,
        "rotary_percent": 1.0 if rotary is None else rotary.dim / model.head_size,
        "rotary_seq_len_interpolation_factor": scaling.factor if is_linear and scaling is not None else None,
        "use_rope_scaling": is_llama3,
        "rope_scaling_factor": scaling.factor if is_llama3 and scaling is not None else 8.0,
        "softmax_scale": model.attention_scale,
        "softmax_type": "learnable" if kinds[0].sinks else "vanilla",
        "window_size": None if window is None else (window - 1, 0),
        "window_attn_skip_freq": None if window is None or all(windowed) else [int(each) for each in windowed],
        "no_rope_freq": [int(each) for each in still] if has_still else None,
    }


def _is_numbers(value: Any) -> bool:
    each = value if isinstance(value, list | tuple) else [value]
    return len(each) <= 10_000 and all(type(one) is int for one in each)
