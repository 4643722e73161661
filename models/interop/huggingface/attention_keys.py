"""Map the attention keys of a Hugging Face config.json to our fields, and back.

Their keys are on the left, our fields on the right:

rope_theta, rope_scaling | rope_parameters       <->  rope_base, rope_scaling, rotary_share: for all layers, or by layer kind
sliding_window, layer_types, no_rope_layers ..   <->  window and position, or layers and layer_kinds

A family's keys are data (`family.py`). With a window, a query at position q sees the sliding_window keys up to q.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from triaxis.engine.config.schema.layer_kinds import RopeScaling, Rotary
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.errors import shown
from triaxis.models.interop.huggingface.family import FULL, OF_ROPE, SLIDING, Family, LayerKeys, Names, RopeKeys

Keys = Mapping[str, Any]
Fields = dict[str, Any]

NO_ROPE = "no_rope"
"""Name of the layer kind without RoPE; suffix of a kind's name if it also has a window."""

PHI3_FIELDS = {"type", "factor", "original_max_position_embeddings", "short_factor", "long_factor"}
"""Fields of a Phi-3 scaling. Before transformers 5, Phi-3 accepts only the type and the two lists among them."""

OLD_TYPES = {"su": "longrope"}
"""Scaling types that had another name in the first Phi-3 files."""


def read_attention(keys: Keys, family: Family, model: Fields) -> list[str]:
    """Add attention fields to `model`, which already has `num_layers`.

    Returns problems. If there are any, or the family has no RoPE, `model` is unchanged.
    """
    rope = family.rope
    if rope is None:
        return []
    ropes, problems = _read_ropes(keys, rope)
    window, types, more = _read_types(keys, family.layers, model["num_layers"])
    rotates, wrong = _read_rotates(keys, family.layers, model["num_layers"])
    if problems := [*problems, *more, *wrong]:
        return problems
    by_type, first = len(rope.bases) > 1, ropes[next(iter(rope.bases))]
    # If layer types differ, the model gets the first type's base and no scaling; scaling then belongs to that type's layers only.
    model |= {"rope_base": first["rope_base"]} if by_type else first
    kinds: dict[str, Fields] = {}
    names = []
    for kind, is_rotated in zip(types, rotates, strict=True):
        fields: Fields = {"window": window} if kind == SLIDING else {}
        if not is_rotated:
            fields["position"] = "none"
        elif by_type:
            fields |= {name: value for name, value in ropes[kind].items() if value != model.get(name)}
        names.append(kind if is_rotated else NO_ROPE if kind == FULL else f"{kind}_{NO_ROPE}")
        kinds[names[-1]] = fields
    if len(kinds) == 1:
        model |= kinds[names[0]]
    else:
        model["layers"] = [
            name if (count := len(list(run))) == 1 else f"{name}*{count}" for name, run in groupby(names)
        ]
        model["layer_kinds"] = kinds
    return []


def _read_ropes(keys: Keys, rope: RopeKeys) -> tuple[dict[str, Fields], list[str]]:
    """Read `rope_base`, `rope_scaling` and `rotary_share` for each layer type. Returns them by type, and problems."""
    ropes: dict[str, Fields] = {}
    problems = [
        f"{name} = {shown(keys[name])}: must be a mapping; how the model's heads rotate would be a guess."
        for name in OF_ROPE
        if not isinstance(keys.get(name), Mapping | None)
    ]
    for number, (kind, (base_keys, default)) in enumerate(rope.bases.items()):
        sources = dict(_sources(keys, kind, has_scaling=number == 0))
        base, wrong = _agreed(keys, sources, base_keys, "rope_theta", default)
        problems += wrong
        fields: Fields = {"rope_base": base}
        if rope.share is not None:
            share, wrong = _agreed(keys, sources, rope.share[0], "partial_rotary_factor", rope.share[1])
            problems += wrong
            fields |= {} if share == 1.0 else {"rotary_share": share}
        scalings = []
        for place, source in sources.items():
            scaling = _scaling(source, keys, rope)
            if scaling["type"] != "default":
                scalings.append(scaling)
            elif len(scaling) > 1:
                problems.append(
                    f"{place} = {shown(dict(source))}: RoPE of this form is not built yet; the model would be another one."
                )
        if any(scaling != scalings[0] for scaling in scalings):
            problems.append(
                f"{' and '.join(sources)} differ: which of them the model has would be a guess. Remove one."
            )
        fields |= {"rope_scaling": scalings[0]} if scalings else {}
        ropes[kind] = fields
    return ropes, problems


def _sources(keys: Keys, kind: str, *, has_scaling: bool) -> Iterator[tuple[str, Keys]]:
    """Yield the place and content of each mapping with RoPE settings for layer type `kind`.

    `has_scaling`: whether the file's `rope_scaling` applies to this type. `kind` is "" if all layers share their settings.
    Otherwise `rope_parameters` must have one mapping per layer type. If it holds settings directly, it is yielded under an
    unknown key, which becomes a problem.
    """
    new, old = (keys.get(name) for name in OF_ROPE)
    if isinstance(new, Mapping):
        if not kind:
            yield OF_ROPE[0], new
        elif isinstance(new.get(kind), Mapping):
            yield f"{OF_ROPE[0]}.{kind}", new[kind]
        elif any(not isinstance(value, Mapping) for value in new.values()):
            yield OF_ROPE[0], {"is of no type of layer": dict(new)}
    if has_scaling and isinstance(old, Mapping):
        yield OF_ROPE[1], old


def _agreed(
    keys: Keys, sources: Mapping[str, Keys], names: Names, inner: str, default: float
) -> tuple[Any, Iterator[str]]:
    """Read one setting that the file may give in several places.

    Returns:
        The first value given, or `default`; and a problem for each place with another value.
    """
    given = {place: source[inner] for place, source in sources.items() if source.get(inner) is not None}
    given |= {name: keys[name] for name in names if keys.get(name) is not None}
    if not given:
        return default, iter(())
    (place, value), *others = given.items()
    return value, (
        f"{place} has {inner} = {shown(value)}, and elsewhere it is {shown(other)} ({where}): which one the model was trained "
        f"with would be a guess. Remove one of them."
        for where, other in others
        if other != value
    )


def _scaling(source: Keys, keys: Keys, rope: RopeKeys) -> Fields:
    """Build our scaling fields from RoPE mapping `source` and top-level `keys`.

    Source: transformers' modeling_rope_utils.py.
    """
    of_type = source.get("rope_type", source.get("type", "default"))
    scaling = {"type": OLD_TYPES.get(of_type, of_type) if isinstance(of_type, str) else of_type}
    for name, value in source.items():
        is_share = name == "partial_rotary_factor" and (rope.share is not None or value == 1.0)
        if name not in ("rope_type", "type", "rope_theta") and not is_share and value is not None:
            scaling[name] = value
    longest = keys.get("max_position_embeddings")
    apart = keys.get("original_max_position_embeddings", rope.original_length)
    if scaling["type"] in ("llama3", "yarn", "longrope") and apart is not None:
        scaling["original_max_position_embeddings"] = apart
    elif scaling["type"] in ("yarn", "longrope") and longest is not None:
        scaling.setdefault("original_max_position_embeddings", longest)
    original = scaling.get("original_max_position_embeddings")
    if scaling["type"] == "longrope" and isinstance(longest, int) and isinstance(original, int):
        scaling.setdefault("factor", longest / original)
    return scaling


def _read_types(keys: Keys, layers: LayerKeys, num_layers: int) -> tuple[int | None, list[str], list[str]]:
    """Read the window and the layer types. Returns the window's length, FULL or SLIDING for each layer, and problems."""
    window = keys.get("sliding_window", layers.default_window)
    types = keys.get("layer_types") if layers.windows == "some" else None
    if unknown := sorted(set(types or ()) - {FULL, SLIDING}):
        return None, [], [f"layer_types = {', '.join(unknown)}: only {FULL} and {SLIDING} are built."]
    is_off = window is None or layers.windows == "none" or bool(layers.switch and not keys.get(layers.switch))
    if types is not None and len(types) != num_layers:
        return None, [], [f"{len(types)} layer_types are given for {num_layers} layers: some layers would be a guess."]
    if is_off and SLIDING in (types or ()):
        switches = " or ".join(name for name in (layers.switch, "sliding_window") if name)
        return None, [], [f"layer_types has {SLIDING}, and {switches} switches it off. Remove one of them."]
    if is_off:
        types = [FULL] * num_layers
    elif types is None:
        types = [SLIDING if _has_window(keys, layers, layer) else FULL for layer in range(num_layers)]
    return window, types, []


def _has_window(keys: Keys, layers: LayerKeys, layer: int) -> bool:
    """Whether a layer has a window by the family's rule.

    The rule applies if the file has no `layer_types`. In a family without a rule, every layer has a window.
    """
    if layers.first is not None:
        return bool(layer >= keys.get(*layers.first))
    if layers.period is not None:
        return bool((layer + 1) % keys.get(*layers.period))
    if layers.no_rope is not None:
        return not _rotates(keys, layers.no_rope, layer)
    return True


def _read_rotates(keys: Keys, layers: LayerKeys, num_layers: int) -> tuple[list[bool], list[str]]:
    """Read which layers rotate queries and keys. Returns a flag for each layer, and problems."""
    if layers.no_rope is None:
        return [True] * num_layers, []
    key = layers.no_rope[0]
    listed = keys.get(key)
    if listed is not None and len(listed) < num_layers:
        return [], [f"{key} has {len(listed)} entries for {num_layers} layers: some layers would be a guess."]
    return [_rotates(keys, layers.no_rope, layer) for layer in range(num_layers)], []


def _rotates(keys: Keys, no_rope: tuple[str, str, int], layer: int) -> bool:
    key, interval, default = no_rope
    listed = keys.get(key)
    return bool(listed[layer] if listed is not None else (layer + 1) % keys.get(interval, default))


def attention_differences(model: ModelConfig, family: Family) -> Iterator[str]:
    """Yield a phrase for each of the model's attention features that the family lacks.

    A family without RoPE yields none here, since `beyond_plain` finds its differences.
    """
    if family.rope is None:
        return
    by_type = len(family.rope.bases) > 1
    allowed = {"window", *(("position",) if family.layers.no_rope else ())}
    allowed |= {"rope_base", "rope_scaling"} if by_type else set()
    allowed |= set() if family.experts is None else {"mlp"}
    for name, kind in model.layer_kinds.items():
        if others := sorted(set(kind) - allowed):
            yield f"model.layer_kinds.{name} has {', '.join(others)}, which no layer of it has on its own"
    if len(windows := {kind.window for kind in model.kinds if kind.window is not None}) > 1:
        yield f"windows of {', '.join(map(str, sorted(windows)))} keys, there all have one length"
    if "layers" in family.fields and family.layers.windows != "some":
        if len({kind.window for kind in model.kinds}) > 1:
            yield "windows on some layers, there all layers are alike in this"
        elif family.layers.windows == "none" and any("window" in kind for kind in model.layer_kinds.values()):
            yield "layers with a window, which it does not have"
    if any(kind.sinks for kind in model.kinds):
        yield "attention sinks, which it does not have"
    for has_window, words in ((False, "without"), (True, "with")) if by_type else ():
        ropes = {kind.rotary for kind in model.kinds if (kind.window is not None) == has_window}
        if len(ropes) > 1:
            yield f"layers {words} a window whose RoPE differs, there it is one"
        elif has_window and any(rope is not None and rope.scaling is not None for rope in ropes):
            yield "a scaled RoPE in layers with a window, there it is not scaled"


def attention_keys(model: ModelConfig, family: Family) -> Iterator[tuple[str, object]]:
    """Yield the keys that set the layers' RoPE and windows, with their values.

    `sliding_window` and its switch are written even if there is no window. A family without RoPE has no such keys.
    """
    if family.rope is None:
        return
    yield from _rope_keys(model, family.rope)
    layers, kinds = family.layers, model.kinds[: model.num_layers]
    if layers.no_rope is not None:
        yield layers.no_rope[0], [int(kind.rotary is not None) for kind in kinds]
    window = next((kind.window for kind in kinds if kind.window is not None), None)
    if layers.switch:
        yield layers.switch, window is not None
    if layers.period is not None:
        # transformers needs a length to build the mask, even if no layer uses it.
        yield "sliding_window", window or model.seq_length
    elif layers.windows != "none":
        yield "sliding_window", window
    if layers.windows == "some" and (window is not None or layers.period is not None):
        types = [FULL if kind.window is None else SLIDING for kind in kinds]
        yield "layer_types", types
        if layers.first is not None:
            # For older transformers releases, which do not read `layer_types`.
            yield layers.first[0], types.index(SLIDING)


def _rope_keys(model: ModelConfig, rope: RopeKeys) -> Iterator[tuple[str, object]]:
    """Yield RoPE keys in the form used before transformers 5.

    If the family's layer types have separate settings, `rope_parameters`, the key in transformers 5, is also yielded.
    """
    top: dict[str, set[float]] = {}
    new: dict[str, Fields] = {}
    for kind, (names, default) in rope.bases.items():
        of_kind = [each.rotary for each in model.kinds if not kind or (each.window is not None) == (kind == SLIDING)]
        rotary = next((each for each in of_kind if each is not None), None)
        # A layer type that is not used keeps its default.
        base = rotary.base if rotary is not None else default if kind else model.rope_base
        scaling = {} if rotary is None else _scaling_keys(rotary, model, rope)
        top.setdefault(names[0], set()).add(base)
        new[kind] = {"rope_type": "default", **scaling, "rope_theta": base}
        if scaling:
            yield "rope_scaling", scaling
        if rotary is not None and rope.share is not None:
            yield rope.share[0][0], rotary.dim / model.head_size
        long = None if rotary is None else _longrope(rotary)
        if rope.original_length is not None and long is None:
            yield "original_max_position_embeddings", model.seq_length
        elif long is not None:
            # transformers 4 reads the original length only at the top level, and uses the ratio of both lengths as the factor.
            yield "original_max_position_embeddings", long.original_max_position_embeddings
            if (longest := _longest(long, model)) is not None:
                yield "max_position_embeddings", longest
    # Layer types that share a key but have different values can be written only in the new form.
    yield from ((name, bases.pop()) for name, bases in top.items() if len(bases) == 1)
    if len(new) > 1:
        yield OF_ROPE[0], new


def _scaling_keys(rotary: Rotary, model: ModelConfig, rope: RopeKeys) -> Fields:
    if rotary.scaling is None:
        return {}
    fields = rotary.scaling.model_dump(mode="json", exclude_defaults=True)
    long = _longrope(rotary)
    has_ratio = long is not None and _longest(long, model) is not None
    if rope.original_length is not None and has_ratio and fields.keys() == PHI3_FIELDS:
        # The other two follow from top-level keys.
        return {"type": fields["type"], "short_factor": fields["short_factor"], "long_factor": fields["long_factor"]}
    if long is not None and not has_ratio:
        fields.setdefault("attention_factor", long.rotation_factor)
    return {"rope_type": fields.pop("type"), **fields}


def _longrope(rotary: Rotary) -> RopeScaling | None:
    return rotary.scaling if rotary.scaling is not None and rotary.scaling.type == "longrope" else None


def _longest(scaling: RopeScaling, model: ModelConfig) -> int | None:
    """Compute the maximum length in tokens, `factor` times the original length.

    The result is None if that is not an integer, or is shorter than the model's samples.
    """
    assert scaling.factor is not None and scaling.original_max_position_embeddings is not None, "longrope has both"
    longest = scaling.factor * scaling.original_max_position_embeddings
    return int(longest) if longest.is_integer() and longest >= model.seq_length else None
