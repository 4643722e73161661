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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, Strict
from typing_extensions import TypedDict

from triaxis.engine.config.schema.section import LONGEST_SEQUENCE, Section
from triaxis.engine.config.values.counts import no_bool

if TYPE_CHECKING:  # engine/config/schema/model.py imports this module
    from triaxis.engine.config.schema.model import ModelConfig

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


def kinds_of_layers(model: "ModelConfig") -> tuple[LayerKind, ...]:
    """Resolve each layer's record, in order. An unknown kind name, which a rule refuses, gives the model's own fields."""
    names = _names(model)
    by_name = {name: _resolved(model, name) for name in dict.fromkeys(names)}
    period = tuple(by_name[name] for name in names)
    own = (period * -(-model.num_layers // len(period)))[: model.num_layers]
    return own + (replace(own[-1], is_mtp=True),) * model.num_mtp_layers


def kind_of_layer(model: "ModelConfig", layer: int) -> LayerKind:
    """Resolve a single layer's record."""
    names, is_mtp = _names(model), layer >= model.num_layers
    kind = _resolved(model, names[min(layer, model.num_layers - 1) % len(names)])
    return replace(kind, is_mtp=True) if is_mtp else kind


def known_kinds(model: "ModelConfig") -> Mapping[str, KindFields]:
    """Kinds that `model.layers` may name: those in `model.layer_kinds` and, with `model.moe`, `dense` and `moe`."""
    return {**model.layer_kinds, **(WITH_EXPERTS if model.moe is not None else {})}


def _names(model: "ModelConfig") -> list[str]:
    """List the kind names in one period of the layers; [""] if there are no kinds."""
    return [name for entry in model.layers or () for name in names_in(entry)] or [""]


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


def names_in(entry: str) -> list[str]:
    """List the kind name for each layer that an entry of `model.layers` stands for; empty if the entry is invalid."""
    match = _ENTRY.fullmatch(entry.strip())
    times = int(match["times"] or 1) if match else 0
    return [match["name"]] * times if match and times <= LONGEST_PATTERN else []
