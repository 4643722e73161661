"""Layer kinds: what differs between layers, resolved into one record per layer.

    layers: [local*5, global]                         repeated, and cut at num_layers
    layer_kinds:
      local: {window: 512, rope_base: 10000.0}        a kind lists the fields in which it differs from the model's own
      global: {rope_scaling: {type: linear, factor: 8.0}}

    ->  model.layer_kind(0) .. model.layer_kind(num_layers - 1)

All code that depends on a layer's kind (specs, modules, FLOPs, memory) reads the layer's record, never the configuration fields.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, Strict
from typing_extensions import TypedDict

from triaxis.engine.config.attention_kernels import ATTENTION_KERNELS
from triaxis.engine.config.attention_pattern import attention_pattern
from triaxis.engine.config.counts import no_bool
from triaxis.engine.config.problem import Problem, Rule, Subject
from triaxis.engine.config.section import LONGEST_SEQUENCE, Section

if TYPE_CHECKING:
    from triaxis.engine.config.model import ModelConfig


WITH_EXPERTS: Mapping[str, "KindFields"] = MappingProxyType({"dense": {}, "moe": {"mlp": "moe"}})
"""Layer kinds that every model with `model.moe` has without listing them."""

LONGEST_PATTERN = 10_000
"""Maximum number of layers that `model.layers` may list."""


class RopeScaling(Section):
    """A change to RoPE's frequencies for contexts longer than in pretraining.

    Names and defaults follow Hugging Face's `rope_scaling` (transformers, modeling_rope_utils.py).
    """

    type: Literal["linear", "llama3", "yarn", "longrope"] = Field(description="rule by which frequencies change")
    factor: float | None = Field(None, ge=1, description="how much longer contexts become")
    original_max_position_embeddings: int | None = Field(
        None, gt=1, le=LONGEST_SEQUENCE, description="tokens of a context in pretraining"
    )
    low_freq_factor: float | None = Field(
        None, gt=0, description="llama3: longer waves than original / this are scaled"
    )
    high_freq_factor: float | None = Field(None, gt=0, description="llama3: shorter waves than original / this stay")
    beta_fast: float | None = Field(None, gt=0, description="yarn: dims that turn more often stay; null: 32")
    beta_slow: float | None = Field(None, gt=0, description="yarn: dims that turn less often are scaled; null: 1")
    truncate: bool = Field(True, description="yarn: round the bounds between those dims to whole dims")
    mscale: float | None = Field(None, gt=0, description="yarn: with mscale_all_dim, another factor on cos and sin")
    mscale_all_dim: float | None = Field(None, gt=0, description="yarn: divisor of that factor")
    attention_factor: float | None = Field(
        None, gt=0, description="yarn, longrope: factor on cos and sin; null: by the rule's own formula"
    )
    short_factor: tuple[float, ...] | None = Field(
        None, description="longrope: divisor per frequency, up to the original length"
    )
    long_factor: tuple[float, ...] | None = Field(None, description="longrope: divisor per frequency, beyond it")

    @property
    def rotation_factor(self) -> float:
        """Factor on cosines and sines, from YaRN (2309.00071, section 3.4) or LongRoPE (2402.13753); else 1."""
        if self.type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        assert self.factor is not None, "both have a factor"
        if self.factor <= 1:
            return 1.0
        if self.type == "longrope":
            assert self.original_max_position_embeddings is not None, "longrope has the original length"
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))
        if self.mscale is None or self.mscale_all_dim is None:
            return 0.1 * math.log(self.factor) + 1
        return (0.1 * self.mscale * math.log(self.factor) + 1) / (0.1 * self.mscale_all_dim * math.log(self.factor) + 1)


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


def _given(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Convert a scaling to JSON values, without the fields that have their default."""
    return None if scaling is None else scaling.model_dump(mode="json", exclude_defaults=True)


Window = Annotated[int, Field(gt=0, le=LONGEST_SEQUENCE)]
RopeBase = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class KindFields(TypedDict, total=False):
    """The fields in which a kind differs from the model. An absent field has the model's value."""

    __pydantic_config__ = ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)  # type: ignore[misc]

    window: Annotated[Window | None, BeforeValidator(no_bool)]
    position: Literal["rope", "none"]
    rope_base: Annotated[RopeBase, BeforeValidator(no_bool)]
    rope_scaling: Annotated[RopeScaling | None, PlainSerializer(_given)]
    rotary_share: Annotated[Share, BeforeValidator(no_bool)]
    sinks: Annotated[bool, Strict()]
    mlp: Literal["dense", "moe"]


_OF_ROPE = ("rope_base", "rope_scaling", "rotary_share")


@dataclass(frozen=True, slots=True)
class Rotary:
    """RoPE's frequencies; layers with an equal record share one table.

    Attributes:
        dim: number of a head's elements that rotate, the first ones.
        base: theta.
        scaling: change to the frequencies; None: none.
        is_long: True if the scaling is longrope and samples are longer than in pretraining; `long_factor` then applies.
    """

    dim: int
    base: float
    scaling: RopeScaling | None
    is_long: bool


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The properties of one layer that may differ between a model's layers.

    Attributes:
        name: key in `model.layer_kinds`; "" if the model has no kinds.
        window: number of keys that a query sees, including its own; None: all up to its own.
        rotary: rotation applied to queries and keys; None: they do not rotate.
        sinks: whether each head has a learned logit in the softmax's denominator, which belongs to no key or value.
        has_experts: whether the layer's MLP is a mixture of experts (`model.moe`).
        is_mtp: whether it is a multi-token prediction layer (`model.mtp`), which follows a projection and precedes the head.
    """

    name: str
    window: int | None
    rotary: Rotary | None
    sinks: bool
    has_experts: bool = False
    is_mtp: bool = False


def layer_kinds(model: "ModelConfig") -> tuple[LayerKind, ...]:
    """Resolve each layer's record, in order. An unknown kind name, which a rule refuses, gives the model's own fields."""
    names = _names(model)
    by_name = {name: _resolved(model, name) for name in dict.fromkeys(names)}
    period = tuple(by_name[name] for name in names)
    own = (period * -(-model.num_layers // len(period)))[: model.num_layers]
    return own + (replace(own[-1], is_mtp=True),) * model.num_mtp_layers


def layer_kind(model: "ModelConfig", layer: int) -> LayerKind:
    """Resolve a single layer's record."""
    names, is_mtp = _names(model), layer >= model.num_layers
    kind = _resolved(model, names[min(layer, model.num_layers - 1) % len(names)])
    return replace(kind, is_mtp=True) if is_mtp else kind


def known_kinds(model: "ModelConfig") -> Mapping[str, KindFields]:
    """Kinds that `model.layers` may name: those in `model.layer_kinds` and, with `model.moe`, `dense` and `moe`."""
    return {**model.layer_kinds, **(WITH_EXPERTS if model.moe is not None else {})}


def _names(model: "ModelConfig") -> list[str]:
    """List the kind names in one period of the layers; [""] if there are no kinds."""
    return [name for name in _listed(model.layers or ()) if isinstance(name, str)] or [""]


def _resolved(model: "ModelConfig", name: str) -> LayerKind:
    of_kind: Mapping[str, Any] = known_kinds(model).get(name, {})

    def value(field: str) -> Any:
        return of_kind[field] if field in of_kind else getattr(model, field)

    rotary = None
    if value("position") == "rope":
        scaling = value("rope_scaling")
        original = None if scaling is None else scaling.original_max_position_embeddings
        is_long = original is not None and scaling.type == "longrope" and model.seq_length > original
        mla = model.mla
        dim = int(model.head_size * value("rotary_share")) if mla is None else mla.qk_rope_head_dim
        rotary = Rotary(dim, value("rope_base"), scaling, is_long)
    has_experts = model.moe is not None and of_kind.get("mlp") == "moe"
    return LayerKind(name, value("window"), rotary, value("sinks"), has_experts)


_ENTRY = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_-]*)( *\* *(?P<times>[0-9]{1,5}))?")


def _listed(layers: tuple[str, ...] | list[str]) -> Iterator[str | Problem]:
    """Yield the kind name for each layer that a pattern lists, and a problem for each invalid entry."""
    for entry in layers:
        match = _ENTRY.fullmatch(entry.strip())
        times = int(match["times"] or 1) if match else 0
        if match is None or not 0 < times <= LONGEST_PATTERN:
            yield Problem(
                "model.layers",
                entry,
                f"is no entry of a pattern: each is the name of a kind, or name*count with a count from 1 to "
                f"{LONGEST_PATTERN:,}, such as local*5; the kinds of layers would be a guess",
            )
        else:
            yield from [match["name"]] * times


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
    listed = list(_listed(model.layers))
    yield from (each for each in listed if isinstance(each, Problem))
    names = dict.fromkeys(each for each in listed if isinstance(each, str))
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


def _scalings(model: "ModelConfig") -> Iterator[tuple[str, RopeScaling, str]]:
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


ATTENTION_KIND_RULES: tuple[Rule, ...] = (
    layers_name_kinds,
    scalings_have_their_fields,
    rotation_fits_heads,
    kinds_rotate,
    kernel_has_pattern,
)


BEYOND_PLAIN = (
    "mla",
    "window",
    "sinks",
    "rotary_share",
    "rope_scaling",
    "attention_scale",
    "attention_softcap",
    "norm_placement",
    "parallel_block",
    "embedding_multiplier",
    "residual_multiplier",
    "logit_divisor",
    "logit_softcap",
    "layers",
    "layer_kinds",
    "moe",
    "mtp",
)
"""`model` fields that plain models in other engines lack: there, a non-default value cannot be expressed."""


def beyond_plain(model: "ModelConfig", known: Collection[str] = ()) -> list[str]:
    """List `field = value` for each BEYOND_PLAIN field with a non-default value, except those in `known`."""
    fields = type(model).model_fields
    return [
        f"model.{name} = {getattr(model, name)}"
        for name in BEYOND_PLAIN
        if name not in known and getattr(model, name) != fields[name].get_default(call_default_factory=True)
    ]
