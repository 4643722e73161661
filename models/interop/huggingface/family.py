"""Records of what a family of Hugging Face models is: keys of a config.json, and names of the tensors.

`families.py` has the families.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from triaxis.engine.config.layer_kinds import ACTIVATIONS
from triaxis.engine.config.model import ModelConfig

Names = tuple[str, ...]
Table = Sequence[tuple[Names, Names]]
"""Rows of names: tensors of ours, joined along their output dim, are equal parts of theirs."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""Names in `layer_types`, and of our kinds of layers."""

OF_ROPE = ("rope_parameters", "rope_scaling")
"""Mappings of RoPE: transformers 5 writes the first, with the base in it; before, the base was apart from the second."""


@dataclass(frozen=True, slots=True)
class Naming:
    """The names of a family's tensors.

    Attributes:
        first, last: tensors before and after the layers.
        layer: those of a layer, without `layers.N.` and `layer_prefix`.
        layer_prefix: theirs, with {} for the layer's number.
        base_prefix: what names lack in a file that was saved from the model without its head.
        transposed: their linear layers keep [in, out].
        interleaved: names of `layer` in whose rows the pairs of RoPE are neighbours, (2 i, 2 i + 1), at the end of each head.
        by_head: names of `layer` whose rows are [heads, (query, key, value), d]; elsewhere all queries come first.
        experts: tensors of one expert of a layer, with {} for its number; without {}: of all of them, [E, out, in].
        ahead: what a layer of multi-token prediction has besides those of `layer`; empty: the family has no such layers.
        copies: tensors of ours, and names in such a layer of copies of them.
        fused: names where all experts of a layer are one tensor, as in the modules of transformers 5; None: there are none.
        buffers: tensors of old files that are constants, not weights.
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
    """The keys of RoPE.

    Attributes:
        bases: by type of layer ("": all layers are alike), keys of the base at the top of a file, and its default. An export writes
            the first key. A top-level `rope_scaling` is that of the first type.
        share: the same of the share of a head that rotates; None: all of it.
        original_length: default of `original_max_position_embeddings`; None: the longest text of the model.
    """

    bases: Mapping[str, tuple[Names, float]]
    share: tuple[Names, float] | None = None
    original_length: int | None = None

    @property
    def keys(self) -> set[str]:
        """Return the keys at the top of a file."""
        found = [*self.bases.values(), *(() if self.share is None else (self.share,))]
        return {*OF_ROPE, "original_max_position_embeddings"} | {key for keys, _ in found for key in keys}

    @property
    def fields(self) -> set[str]:
        """Return our fields of `model` that they can express."""
        return {"rope_base", "rope_scaling"} | (set() if self.share is None else {"rotary_share"})


@dataclass(frozen=True, slots=True)
class LayerKeys:
    """The keys that make layers differ.

    Attributes:
        windows: layers that may have a window: none, all of them, or those that `layer_types` lists.
        default_window: of a file without `sliding_window`; null in a file is none.
        switch: key that must be true where there are windows; "": there is none.
        first: key of the first layer with a window, and its default, in a file without `layer_types`.
        period: key of p, and its default: each p-th layer has no window, in a file without `layer_types`. A key "" is none.
        no_rope: key of a list with 0 for each layer without RoPE, the key of p where it is left out (each p-th has none), and
            the default of p.
    """

    windows: Literal["none", "all", "some"] = "none"
    default_window: int | None = None
    switch: str = ""
    first: tuple[str, int] | None = None
    period: tuple[str, int] | None = None
    no_rope: tuple[str, str, int] | None = None

    @property
    def keys(self) -> set[str]:
        """Return all of them."""
        of_windows = {"none": (), "all": ("sliding_window",), "some": ("sliding_window", "layer_types")}[self.windows]
        others = [self.switch, *(pair[0] for pair in (self.first, self.period) if pair is not None)]
        return {key for key in (*of_windows, *others, *(self.no_rope or ())[:2]) if key}

    @property
    def fields(self) -> set[str]:
        """Return our fields of `model` that they can express."""
        by_layer = self.windows == "some" or self.no_rope is not None
        return ({"window"} if self.windows != "none" else set()) | ({"layers", "layer_kinds"} if by_layer else set())


@dataclass(frozen=True, slots=True)
class ScaleKey:
    """The key of the factor of attention's logits, where a family has one.

    Attributes:
        key: its name.
        default: its value in a file that leaves it out.
        to_ours, to_theirs: the factor as a function of the value, and the inverse, which is None where no value gives the factor.
    """

    key: str
    default: float
    to_ours: Callable[[float], float]
    to_theirs: Callable[[float], float | None]


@dataclass(frozen=True, slots=True)
class DerivedKey:
    """A key whose value follows from the model.

    Attributes:
        value: the value as a function of our `model`.
        why: why another value cannot be built.
        may_lack: a file may leave the key out.
    """

    value: Callable[[ModelConfig], object]
    why: str
    may_lack: bool = True


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """The keys of layers with experts.

    Attributes:
        names: spellings of a key, of which an export writes the first -> (field of `model.moe`, default). A field without a default
            in `model.moe` must be in a file whose default is null.
        fixed: fields of `model.moe` that the family decides.
        has_bias: the choice of experts has a bias.
        has_shared: there are shared experts.
        method: key that says whether groups count, its value where they do not (the default), and where they do; "": they do.
        first: key of the number of dense layers before all others, and its default. A key "" is none.
        step: key of p, and its default: each p-th layer has experts. A key "" is none.
        listed: key of a list of dense layers; "": there is none.
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
        """Return whether layers may have no experts."""
        return bool(self.first[0] or self.listed)

    @property
    def keys(self) -> set[str]:
        """Return all of them."""
        others = {self.first[0], self.step[0], self.listed, *self.method[:1]} - {""}
        return {key for names in self.names for key in names} | others | self.in_training


@dataclass(frozen=True, slots=True)
class Family:
    """The keys, rules and names of one `model_type`.

    Attributes:
        architecture: the class of transformers that is a language model of this family.
        naming: of its tensors.
        names: their key -> our field, with the same value.
        fixed: our fields that the family decides, not the file.
        defaults: values of keys that a file may leave out; other keys of `names` must be there.
        activation_key: their key of the activation.
        is_gated: the MLP is gated with any activation.
        rope: keys of RoPE; None: no layer rotates.
        layers: keys that make layers differ.
        scale: key of the factor of attention's logits; None: it is 1 / sqrt(head_dim).
        computed: our field -> (another of our fields, the function of that which it is here).
        off: values that keys of this family must have, and why.
        embedding_dropout: default of `embd_pdrop`, which must equal the branches' dropout; None: the family has no such key.
        heads_divide_hidden: hidden_size must be a multiple of the number of heads, whatever head_dim is.
        latents: key -> (field of `model.mla`, default), of a family with latent attention; empty: it has none.
        derived: keys whose value follows from our `model`.
        unused: keys that nothing reads in the models of this family that are built.
        experts: keys of layers with experts; None: there are none.
        further: spellings of the number of layers behind the last that predict further tokens. Where `naming` has them, they are
            those of `model.mtp`; elsewhere an import leaves them out.
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
        """Return our activation for each of theirs."""
        kinds = [kind for kind in ACTIVATIONS.values() if kind.is_gated == self.is_gated]
        return {theirs: kind.name for kind in kinds for theirs in kind.hugging_face}

    @property
    def keys(self) -> set[str]:
        """Return the keys of a file that say what the model is."""
        keys = {*self.names, *self.off, *self.latents, *self.derived, self.activation_key}
        keys |= self.layers.keys | self.unused | set(self.further)
        keys |= set() if self.experts is None else self.experts.keys
        keys |= set() if self.rope is None else self.rope.keys
        keys |= set() if self.scale is None else {self.scale.key}
        return keys | (set() if self.embedding_dropout is None else {"embd_pdrop"})

    @property
    def fields(self) -> set[str]:
        """Return our fields of `model` that the family decides or has a key for."""
        fields = {*self.names.values(), *self.fixed, *self.computed} | self.layers.fields
        fields |= {"mla"} if self.latents else set()
        fields |= {"mtp"} if self.naming.ahead else set()
        fields |= set() if self.experts is None else {"moe", "layers", "layer_kinds"}
        fields |= set() if self.rope is None else self.rope.fields
        return fields | (set() if self.scale is None else {"attention_scale"})
