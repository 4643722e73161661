"""Records that describe a Hugging Face model family: its config.json keys and tensor names.

The families themselves are in `families.py`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from triaxis.engine.config.layer_kinds import ACTIVATIONS
from triaxis.engine.config.model import ModelConfig

Names = tuple[str, ...]
Table = Sequence[tuple[Names, Names]]
"""Rows of names: our tensors, joined along their output dim, are split into equal parts, which are theirs."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""Layer types in `layer_types`, and names for our layer kinds."""

OF_ROPE = ("rope_parameters", "rope_scaling")
"""Keys with RoPE settings. transformers 5 writes the first, which includes the base; older files keep the base apart from the
second.
"""


@dataclass(frozen=True, slots=True)
class Naming:
    """Tensor names in a family.

    Attributes:
        first, last: tensors before and after the layers.
        layer: tensors in a layer, without `layers.N.` and `layer_prefix`.
        layer_prefix: prefix in their names, with {} for the layer number.
        base_prefix: prefix that is missing if the file was saved from the model without its head.
        transposed: whether their linear layers are stored as [in, out].
        interleaved: names in `layer` whose rows at the end of each head keep RoPE pairs as neighbours, (2 i, 2 i + 1).
        by_head: names in `layer` whose rows are [heads, (query, key, value), d]; elsewhere all queries come first.
        experts: tensors of one expert in a layer, with {} for its number; names without {} hold all experts, [E, out, in].
        ahead: extra tensors in a multi-token prediction layer, besides those in `layer`; empty if the family has no such layers.
        copies: our tensors that a multi-token prediction layer duplicates, and the copies' names.
        fused: names for files with all experts of a layer in one tensor, as in transformers 5 modules; None if there are none.
        buffers: tensors in old files that are constants, not weights.
    """

    first: Table
    layer: Table
    last: Table
    layer_prefix: str
    base_prefix: str
    transposed: bool = False
    by_head: frozenset[str] = frozenset()
    interleaved: frozenset[str] = frozenset()
    experts: Table = ()
    ahead: Table = ()
    copies: Table = ()
    fused: "Naming | None" = None
    buffers: re.Pattern[str] = re.compile(r".*\.self_attn\.rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class RopeKeys:
    """RoPE keys.

    Attributes:
        bases: layer type ("" if all layers are alike) -> top-level keys for the base, and its default. An export writes the
            first key. A top-level `rope_scaling` applies to the first type.
        share: top-level keys for the rotated share of each head, and its default; None rotates the whole head.
        original_length: default for `original_max_position_embeddings`; None uses the model's longest text.
    """

    bases: Mapping[str, tuple[Names, float]]
    share: tuple[Names, float] | None = None
    original_length: int | None = None

    @property
    def keys(self) -> set[str]:
        """Top-level RoPE keys."""
        found = [*self.bases.values(), *(() if self.share is None else (self.share,))]
        return {*OF_ROPE, "original_max_position_embeddings"} | {key for keys, _ in found for key in keys}

    @property
    def fields(self) -> set[str]:
        """Our `model` fields that these keys can express."""
        return {"rope_base", "rope_scaling"} | (set() if self.share is None else {"rotary_share"})


@dataclass(frozen=True, slots=True)
class LayerKeys:
    """Keys that make layers differ.

    Attributes:
        windows: layers that may have a window: none, all, or those listed in `layer_types`.
        default_window: window length if `sliding_window` is absent; a null there means no window.
        switch: key that must be true for windows to apply; "" if there is none.
        first: key for the first layer with a window, and its default; used if `layer_types` is absent.
        period: key for p, and its default; every p-th layer has no window. Used if `layer_types` is absent. A key "" does not
            exist.
        no_rope: key for a list with 0 for each layer without RoPE; and, if the list is absent, the key for p (every p-th layer
            has no RoPE) and p's default.
    """

    windows: Literal["none", "all", "some"] = "none"
    default_window: int | None = None
    switch: str = ""
    first: tuple[str, int] | None = None
    period: tuple[str, int] | None = None
    no_rope: tuple[str, str, int] | None = None

    @property
    def keys(self) -> set[str]:
        """All keys that make layers differ."""
        of_windows = {"none": (), "all": ("sliding_window",), "some": ("sliding_window", "layer_types")}[self.windows]
        others = [self.switch, *(pair[0] for pair in (self.first, self.period) if pair is not None)]
        return {key for key in (*of_windows, *others, *(self.no_rope or ())[:2]) if key}

    @property
    def fields(self) -> set[str]:
        """Our `model` fields that these keys can express."""
        by_layer = self.windows == "some" or self.no_rope is not None
        return ({"window"} if self.windows != "none" else set()) | ({"layers", "layer_kinds"} if by_layer else set())


@dataclass(frozen=True, slots=True)
class ScaleKey:
    """Key for the attention logit scale, in families that have one.

    Attributes:
        key: key name.
        default: value if the file leaves it out.
        to_ours, to_theirs: conversion from value to scale, and its inverse, which is None if no value gives the scale.
    """

    key: str
    default: float
    to_ours: Callable[[float], float]
    to_theirs: Callable[[float], float | None]


@dataclass(frozen=True, slots=True)
class DerivedKey:
    """Key whose value follows from the model.

    Attributes:
        value: function from our `model` section to the value.
        why: reason that another value cannot be built.
        may_lack: whether a file may leave the key out.
    """

    value: Callable[[ModelConfig], object]
    why: str
    may_lack: bool = True


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """Keys for layers with experts.

    Attributes:
        names: spellings of a key (an export writes the first) -> (field of `model.moe`, default). A file must have the key if
            both this default and the field's own are missing.
        fixed: `model.moe` fields that the family fixes.
        has_bias: whether expert selection has a bias.
        has_shared: whether there are shared experts.
        method: key that says whether groups apply, its value if they do not (the default), and its value if they do; "" if they
            always do.
        first: key for the number of leading dense layers, and its default. A key "" does not exist.
        step: key for p, and its default: every p-th layer has experts. A key "" does not exist.
        listed: key for a list of dense layers; "" if there is none.
        in_training: keys that only transformers' training loss reads.
    """

    names: Mapping[Names, tuple[str, object]]
    fixed: Mapping[str, object]
    has_bias: bool = False
    has_shared: bool = False
    method: Names = ()
    first: tuple[str, int] = ("", 0)
    step: tuple[str, int] = ("", 1)
    listed: str = ""
    in_training: frozenset[str] = frozenset(
        {"aux_loss_alpha", "output_router_logits", "router_aux_loss_coef", "seq_aux"}
    )

    @property
    def may_be_dense(self) -> bool:
        """Whether some layers may have no experts."""
        return bool(self.first[0] or self.listed)

    @property
    def keys(self) -> set[str]:
        """All keys for layers with experts."""
        others = {self.first[0], self.step[0], self.listed, *self.method[:1]} - {""}
        return {key for names in self.names for key in names} | others | self.in_training


@dataclass(frozen=True, slots=True)
class Family:
    """Keys, rules and names for one `model_type`.

    Attributes:
        architecture: transformers class for a language model in this family.
        naming: tensor names.
        names: their key -> our field, same value.
        fixed: our fields that the family fixes and the file omits.
        defaults: values for keys that a file may leave out; other keys in `names` are required.
        activation_key: their key for the activation.
        is_gated: whether the MLP is gated, with any activation.
        rope: RoPE keys; None if no layer rotates.
        layers: keys that make layers differ.
        scale: key for the attention logit scale; None means 1 / sqrt(head_dim).
        computed: our field -> (source field, function that computes the value from it).
        off: values that this family's keys must have, and why.
        embedding_dropout: default for `embd_pdrop`, which must equal the branches' dropout; None if the family has no such key.
        heads_divide_hidden: whether hidden_size must be a multiple of the number of heads, regardless of head_dim.
        latents: key -> (field of `model.mla`, default), for latent attention; empty if the family has none.
        derived: keys whose value follows from our `model`.
        unused: keys that nothing reads in the models supported here.
        experts: keys for layers with experts; None if there are none.
        further: spellings of the number of multi-token prediction layers. They map to `model.mtp` if `naming` has such layers;
            otherwise an import leaves those layers out.
    """

    architecture: str
    naming: Naming
    names: Mapping[str, str]
    fixed: Mapping[str, object]
    defaults: Mapping[str, object]
    activation_key: str = "hidden_act"
    is_gated: bool = True
    rope: RopeKeys | None = None
    layers: LayerKeys = LayerKeys()
    scale: ScaleKey | None = None
    computed: Mapping[str, tuple[str, Callable[[Any], object]]] = field(default_factory=dict)
    off: Mapping[str, tuple[tuple[object, ...], str]] = field(default_factory=dict)
    embedding_dropout: float | None = None
    heads_divide_hidden: bool = False
    latents: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    derived: Mapping[str, DerivedKey] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    experts: ExpertKeys | None = None
    further: Names = ()

    @property
    def activations(self) -> dict[str, str]:
        """Their activation -> ours."""
        kinds = [kind for kind in ACTIVATIONS.values() if kind.is_gated == self.is_gated]
        return {theirs: kind.name for kind in kinds for theirs in kind.hugging_face}

    @property
    def keys(self) -> set[str]:
        """Config.json keys that describe the model."""
        keys = {*self.names, *self.off, *self.latents, *self.derived, self.activation_key}
        keys |= self.layers.keys | self.unused | set(self.further)
        keys |= set() if self.experts is None else self.experts.keys
        keys |= set() if self.rope is None else self.rope.keys
        keys |= set() if self.scale is None else {self.scale.key}
        return keys | (set() if self.embedding_dropout is None else {"embd_pdrop"})

    @property
    def fields(self) -> set[str]:
        """Our `model` fields that the family fixes or has a key for."""
        fields = {*self.names.values(), *self.fixed, *self.computed} | self.layers.fields
        fields |= {"mla"} if self.latents else set()
        fields |= {"mtp"} if self.naming.ahead else set()
        fields |= set() if self.experts is None else {"moe", "layers", "layer_kinds"}
        fields |= set() if self.rope is None else self.rope.fields
        return fields | (set() if self.scale is None else {"attention_scale"})
