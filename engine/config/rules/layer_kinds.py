"""Rules about layer kinds: their names, what rotates, and the attention kernel that they need."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from triaxis.engine.config.quantities.attention_pattern import attention_pattern
from triaxis.engine.config.rules.problem import Problem, Rule, Subject
from triaxis.engine.config.schema.layer_kinds import LONGEST_PATTERN, WITH_EXPERTS, RopeScaling, known_kinds, names_in
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.values.attention_kernels import ATTENTION_KERNELS


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields that one scaling type uses."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


_SCALINGS: Mapping[str, _Fields] = {
    "linear": _Fields(("factor",)),
    "llama3": _Fields(("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")),
    "yarn": _Fields(
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor"),
    ),
    "longrope": _Fields(
        ("factor", "original_max_position_embeddings", "short_factor", "long_factor"), ("attention_factor",)
    ),
}


_OF_ROPE = ("rope_base", "rope_scaling", "rotary_share")


def layers_name_kinds(subject: Subject) -> Iterator[Problem]:
    model = subject.config.model
    if model.layers is None:
        if model.layer_kinds:
            yield subject.problem(
                "model.layers",
                f"must list kinds where model.layer_kinds has some ({', '.join(model.layer_kinds)}): no layer would be of them",
                {},
                f"For example model.layers=[{', '.join(model.layer_kinds)}].",
            )
        return
    for entry in model.layers:
        if not names_in(entry):
            yield Problem(
                "model.layers",
                entry,
                f"is no entry of a pattern: each is the name of a kind, or name*count with a count from 1 to "
                f"{LONGEST_PATTERN:,}, such as local*5; the kinds of layers would be a guess",
            )
    names = dict.fromkeys(name for entry in model.layers for name in names_in(entry))
    if unknown := [name for name in names if name not in known_kinds(model)]:
        known = ", ".join(known_kinds(model)) or "none"
        yield subject.problem(
            "model.layers",
            f"names {', '.join(unknown)}, but model.layer_kinds has {known}: what those layers are would be a guess",
            {},
            f"Add the kind; {unknown[0]}: {{}} is a layer with the model's own fields.",
        )
    if taken := [name for name in model.layer_kinds if model.moe is not None and name in WITH_EXPERTS]:
        yield Problem(
            "model.layer_kinds",
            taken[0],
            "is a kind that every model with model.moe has: which of the two is meant would be a guess",
            {},
            "Choose another name.",
        )
    if without := [name for name, kind in model.layer_kinds.items() if model.moe is None and kind.get("mlp") == "moe"]:
        yield Problem(
            f"model.layer_kinds.{without[0]}.mlp",
            "moe",
            "needs the section model.moe: the experts of these layers would have no sizes",
            {},
            "Give model.moe, or mlp: dense.",
        )
    if unused := [name for name in model.layer_kinds if name not in names]:
        yield Problem(
            "model.layer_kinds",
            unused[0],
            "is a kind that model.layers does not name: no layer would be of it",
            {},
            "Name it there, or remove it.",
        )


def _scalings(model: ModelConfig) -> Iterator[tuple[str, RopeScaling, str]]:
    """Yield (dotted name, scaling, kind name) for each given scaling."""
    if model.rope_scaling is not None:
        yield "model.rope_scaling", model.rope_scaling, ""
    for name, kind in model.layer_kinds.items():
        if (scaling := kind.get("rope_scaling")) is not None:
            yield f"model.layer_kinds.{name}.rope_scaling", scaling, name


def scalings_have_their_fields(subject: Subject) -> Iterator[Problem]:
    for key, scaling, _ in _scalings(subject.config.model):
        fields = _SCALINGS[scaling.type]
        given = [
            name
            for name, about in RopeScaling.model_fields.items()
            if name != "type" and getattr(scaling, name) != about.default
        ]
        for name in fields.required:
            if name not in given:
                yield Problem(f"{key}.{name}", None, f"must be given with type = {scaling.type}: its formula needs it")
        for name in given:
            if name not in (*fields.required, *fields.optional):
                yield Problem(
                    f"{key}.{name}",
                    getattr(scaling, name),
                    f"has no effect with type = {scaling.type}, which has {', '.join((*fields.required, *fields.optional))}",
                    {},
                    "Remove it.",
                )
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        if scaling.type == "llama3" and low is not None and high is not None and high <= low:
            yield Problem(
                f"{key}.high_freq_factor",
                high,
                f"must be above low_freq_factor = {low:g}: between the two, frequencies go from scaled to unscaled",
            )
        if (scaling.mscale is None) != (scaling.mscale_all_dim is None):
            yield Problem(
                f"{key}.mscale", scaling.mscale, "acts only together with mscale_all_dim: one alone has no effect"
            )


def rotation_fits_heads(subject: Subject) -> Iterator[Problem]:
    model = subject.config.model
    # Rows of `DIVISIONS` report odd sizes.
    if not model.heads_have_a_size or (model.position_kind.is_rotary and model.head_size % 2 and model.mla is None):
        return
    for kind in dict.fromkeys(model.kinds):
        rotary = kind.rotary
        if rotary is None:
            continue
        given: Mapping[str, Any] = known_kinds(model).get(kind.name, {})
        of_share, of_scaling = (
            f"model.layer_kinds.{kind.name}." if field in given else "model."
            for field in ("rotary_share", "rope_scaling")
        )
        if (rotary.dim % 2 and model.mla is None) or not rotary.dim:
            yield Problem(
                f"{of_share}rotary_share",
                given.get("rotary_share", model.rotary_share),
                f"rotates {rotary.dim} of the {model.head_size} elements of a head, which must be an even number above 0: RoPE "
                f"turns pairs",
            )
            continue
        for name in ("short_factor", "long_factor"):
            factors = None if rotary.scaling is None else getattr(rotary.scaling, name)
            if factors is not None and (len(factors) != rotary.dim // 2 or min(factors) <= 0):
                yield Problem(
                    f"{of_scaling}rope_scaling.{name}",
                    f"{len(factors)} numbers",
                    f"must be {rotary.dim // 2} numbers above 0, one for each pair of the {rotary.dim} elements that rotate",
                )


def kinds_rotate(subject: Subject) -> Iterator[Problem]:
    """Yield a problem for each kind with fields of RoPE that do not go with the model's positions or attention."""
    model = subject.config.model
    for name, kind in model.layer_kinds.items():
        if model.mla is not None and kind.get("rotary_share", 1.0) != 1.0:
            yield Problem(
                f"model.layer_kinds.{name}.rotary_share",
                kind["rotary_share"],
                "has no effect with model.mla: what rotates of a head is model.mla.qk_rope_head_dim",
                {},
                "Remove it.",
            )
        if model.position_kind.has_table and kind.get("position") == "rope":
            yield Problem(
                f"model.layer_kinds.{name}.position",
                "rope",
                f"does not go with model.position = {model.position}: a token would have two positions. Set "
                f"model.position=none for layers that rotate beside layers that do not",
            )
        given = [field for field in _OF_ROPE if field in kind]
        if given and kind.get("position", model.position) != "rope":
            yield Problem(
                f"model.layer_kinds.{name}.{given[0]}",
                kind.get(given[0]),
                f"has no effect with position = {kind.get('position', model.position)}: nothing rotates in these layers",
            )


def kernel_has_pattern(subject: Subject) -> Iterator[Problem]:
    config, kernel = subject.config, subject.config.kernels.attention
    asked = attention_pattern(config).asked
    lacks = "" if kernel == "auto" else ATTENTION_KERNELS[kernel].lacks(asked)
    if lacks:
        others = [name for name, each in ATTENTION_KERNELS.items() if asked <= each.has["cuda"]]
        yield subject.problem(
            "kernels.attention",
            f"has {lacks}, which the run's attention needs",
            {"kernels.attention": ["auto", *others]},
        )


LAYER_KIND_RULES: tuple[Rule, ...] = (
    layers_name_kinds,
    scalings_have_their_fields,
    rotation_fits_heads,
    kinds_rotate,
    kernel_has_pattern,
)
