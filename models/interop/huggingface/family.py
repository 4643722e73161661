"""Define the records that describe a Hugging Face model family.

They hold config.json keys and tensor names. The families themselves are in `families.py`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.values.model_choices import ACTIVATIONS

Names = tuple[str, ...]
Table = Sequence[tuple[Names, Names]]
"""Rows (our names, their names): our tensors, concatenated along the output dim and split into equal parts, are their tensors."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""Layer types in `layer_types`, and names for our layer kinds."""

OF_ROPE = ("rope_parameters", "rope_scaling")
"""Keys whose values are mappings with RoPE settings. transformers 5 writes the first, with the base inside; older files have the
second, and the base as a top-level key.
"""


@dataclass(frozen=True, slots=True)
class Naming:
    """Tensor names in a family.

    Attributes:
        first, last: names of the tensors before and after the layers.
        layer: names of the tensors in a layer, without our prefix `layers.N.` and without `layer_prefix`.
        layer_prefix: prefix of a layer's tensor names, with {} for the layer number.
        base_prefix: name prefix that is missing in files saved from a model without its head.
        transposed: whether weights of linear layers are stored as [in, out].
        interleaved: family's names of tensors whose heads end with RoPE's pairs as neighbouring rows, (2 i, 2 i + 1).
        by_head: family's names of tensors with rows [heads, (query, key, value), d]. In all others, all queries come first.
        experts: names of one expert's tensors in a layer, with {} for its number; names without {} hold all experts, [E, out, in].
        ahead: extra tensors in a multi-token prediction layer, besides those in `layer`; empty if the family has no such layers.
        copies: our tensors that a multi-token prediction layer duplicates, and the copies' names.
        fused: naming for files with one tensor for all experts of a layer (transformers 5); None: there are no such files.
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
    """A family's config.json keys for RoPE.

    Attributes:
        bases: layer type ("": all layers) -> (top-level keys for RoPE's base, default base). An export writes the first key. A
            top-level `rope_scaling` applies to the first type.
        share: (top-level keys for the share of each head that rotates, default share); None: the whole head rotates.
        original_length: default for `original_max_position_embeddings`; None: `max_position_embeddings` is the default.
    """

    bases: Mapping[str, tuple[Names, float]]
    share: tuple[Names, float] | None = None
    original_length: int | None = None

    @property
    def keys(self) -> set[str]:
        """All top-level config.json keys that may hold the family's RoPE settings."""
        found = [*self.bases.values(), *(() if self.share is None else (self.share,))]
        return {*OF_ROPE, "original_max_position_embeddings"} | {key for keys, _ in found for key in keys}

    @property
    def fields(self) -> set[str]:
        """Our `model` fields that a family's RoPE keys can express."""
        return {"rope_base", "rope_scaling"} | (set() if self.share is None else {"rotary_share"})


@dataclass(frozen=True, slots=True)
class LayerKeys:
    """A family's config.json keys for windows, and for layers without RoPE.

    Attributes:
        windows: layers that may have a window: `none`, `all`, or `some`, the layers that `layer_types` lists.
        default_window: window length if the file has no `sliding_window`. If that key is null, there is no window.
        switch: key that must be true for windows to apply; "": the family has no such key.
        first: (key for the index of the first layer with a window, default index); used if `layer_types` is absent.
        period: (key for p, default p): every p-th layer has no window. Used if `layer_types` is absent. If the key is "", p is the
            default.
        no_rope: (key for a list with 0 for each layer without RoPE, key for p, default p). If the list is absent, every p-th layer
            has no RoPE.
    """

    windows: Literal["none", "all", "some"] = "none"
    default_window: int | None = None
    switch: str = ""
    first: tuple[str, int] | None = None
    period: tuple[str, int] | None = None
    no_rope: tuple[str, str, int] | None = None

    @property
    def keys(self) -> set[str]:
        """All config.json keys that describe windows, or say which layers have no RoPE.

        These are the keys that the attributes name. `sliding_window` is added unless `windows` is `none`. `layer_types` is added
        if `windows` is `some`.
        """
        of_windows = {"none": (), "all": ("sliding_window",), "some": ("sliding_window", "layer_types")}[self.windows]
        others = [self.switch, *(pair[0] for pair in (self.first, self.period) if pair is not None)]
        return {key for key in (*of_windows, *others, *(self.no_rope or ())[:2]) if key}

    @property
    def fields(self) -> set[str]:
        """Our `model` fields that a family's keys for windows and layers without RoPE can express."""
        by_layer = self.windows == "some" or self.no_rope is not None
        return ({"window"} if self.windows != "none" else set()) | ({"layers", "layer_kinds"} if by_layer else set())


@dataclass(frozen=True, slots=True)
class ScaleKey:
    """Key for the attention logit scale, in families that have one.

    Attributes:
        default: value if the file leaves the key out.
        to_ours: function (key's value) -> our scale.
        to_theirs: function (our scale) -> key's value, or None if no value gives that scale.
    """

    key: str
    default: float
    to_ours: Callable[[float], float]
    to_theirs: Callable[[float], float | None]


@dataclass(frozen=True, slots=True)
class DerivedKey:
    """Key whose value follows from the model.

    Attributes:
        value: function (our `model` section) -> the key's value.
        why: why a model with another value cannot be built here.
        may_lack: whether a file may leave the key out.
    """

    value: Callable[[ModelConfig], object]
    why: str
    may_lack: bool = True


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """A family's config.json keys for layers with experts.

    Attributes:
        names: spellings of a key -> (field of `model.moe`, default). An export writes the first spelling. If a
            default is None, a file must have the key, unless `model.moe` has its own default for the field.
        fixed: `model.moe` fields that have one value in the family.
        has_bias: whether a bias is added to scores when experts are chosen.
        has_shared: whether there are shared experts.
        method: (key, value without expert groups, value with them). If a file lacks the key, there are no groups. If the tuple is
            empty, the family has no such key, and groups always apply.
        first: (key for the number of leading dense layers, default number). If the key is "", files have no such key.
        step: (key for p, default p): every p-th layer has experts. If the key is "", files have no such key.
        listed: key for a list of dense layers; "": the family has no such key.
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
        """All config.json keys named in this object's attributes."""
        others = {self.first[0], self.step[0], self.listed, *self.method[:1]} - {""}
        return {key for names in self.names for key in names} | others | self.in_training


@dataclass(frozen=True, slots=True)
class Family:
    """Keys, rules and names for one `model_type`.

    Attributes:
        architecture: transformers class for a language model in this family.
        names: their key -> our field that has the same value.
        fixed: our fields that have one value in the family, and no key in the file.
        defaults: values for keys that a file may leave out; other keys in `names` are required.
        activation_key: their key for the activation.
        is_gated: whether the MLP is gated, with any activation.
        rope: keys for RoPE; None: no layer rotates.
        layers: keys for windows, and for layers without RoPE.
        scale: key for the attention logit scale; None means 1 / sqrt(head_dim).
        computed: our field -> (source field, function that computes the value from the source field).
        off: key -> (allowed values, why no other is allowed).
        embedding_dropout: default for `embd_pdrop`, which must equal the branches' dropout; None if the family has no such key.
        heads_divide_hidden: whether hidden_size must be a multiple of the number of heads, regardless of head_dim.
        latents: key -> (field of `model.mla`, default), for latent attention; empty: the family has ordinary attention.
        derived: keys whose value follows from our `model`.
        unused: keys that nothing reads in the models supported here.
        experts: keys for layers with experts; None if there are none.
        further: spellings of the key for the number of multi-token prediction layers. If `naming` has such layers, this number
            becomes `model.mtp.num_layers`. Otherwise an import leaves the layers out.
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
        """Map Hugging Face's activation names to ours, for activations that are gated as `is_gated` says."""
        kinds = [kind for kind in ACTIVATIONS.values() if kind.is_gated == self.is_gated]
        return {theirs: kind.name for kind in kinds for theirs in kind.hugging_face}

    @property
    def keys(self) -> set[str]:
        """All config.json keys that this object and its parts describe."""
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
