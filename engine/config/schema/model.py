"""The `model` section: the GPT, however it is cut over ranks."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from triaxis.engine.config.schema.extension import ExtensionConfig
from triaxis.engine.config.schema.extension_parts import NO_COSTS, OURS, Extension, OwnCosts
from triaxis.engine.config.schema.layer_kinds import (
    KindFields,
    LayerKind,
    RopeBase,
    RopeScaling,
    Share,
    Window,
    kind_of_layer,
    kinds_of_layers,
)
from triaxis.engine.config.schema.mla import MLAConfig
from triaxis.engine.config.schema.moe import MoEConfig
from triaxis.engine.config.schema.mtp import MTPConfig
from triaxis.engine.config.schema.section import LARGEST_WIDTH, LAYOUT, LONGEST_SEQUENCE, MEANT, Section
from triaxis.engine.config.values.model_choices import (
    ACTIVATIONS,
    NORMS,
    POSITIONS,
    Activation,
    ActivationName,
    Norm,
    NormName,
    Position,
    PositionName,
)

MOST_LAYERS = 10_000
"""Maximum number of transformer layers."""

MOST_HEADS = 2**16
"""Maximum number of query heads, or of key/value heads."""

LARGEST_VOCABULARY = 2**28
"""Maximum vocabulary size in tokens; also the maximum multiple to which the vocabulary is padded."""

BYTES_VOCABULARY = 257
"""Number of ids in the bytes tokenizer: 256 bytes and the end of a document."""


def _head_is_true(value: object) -> object:
    """Convert `head` to true, which means the same for `qk_norm`: a norm over each head. Other values stay.

    Raises:
        ValueError: `value` is none of true, false, head and all_heads.
    """
    if value not in (True, False, "head", "all_heads"):
        raise ValueError("must be true, false, head or all_heads")
    return True if value == "head" else value


class ModelConfig(Section):
    """The GPT itself, independent of how it is cut over ranks."""

    num_layers: int = Field(gt=0, le=MOST_LAYERS, description="transformer layers")
    hidden_size: int = Field(gt=0, le=LARGEST_WIDTH, description="width h of the residual stream")
    num_attention_heads: int = Field(gt=0, le=MOST_HEADS, description="query heads")
    num_kv_heads: int | None = Field(
        None, gt=0, le=MOST_HEADS, description="key/value heads (GQA); null: as many as query heads"
    )
    head_dim: int | None = Field(
        None, gt=0, le=LARGEST_WIDTH, description="size of one head; null: hidden_size / num_attention_heads"
    )
    mla: MLAConfig | None = Field(
        None, description="multi-head latent attention (DeepSeek-V2): sizes of latents and heads; null: none"
    )
    ffn_hidden_size: int | None = Field(
        None, gt=0, le=LARGEST_WIDTH, description="width of the MLP; null: 4 x hidden_size"
    )
    seq_length: int = Field(gt=0, le=LONGEST_SEQUENCE, description="tokens of a training sample")
    vocab_size: int = Field(gt=0, le=LARGEST_VOCABULARY, description="token ids of the tokenizer, without padding")
    # Padding is no part of the logical vocabulary.
    vocab_multiple: Annotated[int, LAYOUT] = Field(
        128, gt=0, le=LARGEST_VOCABULARY, description="the vocabulary is padded to this multiple, whatever tp is"
    )
    norm: NormName = Field("layernorm", description="norm of each branch and before the output head")
    norm_placement: Literal["before", "after", "both"] = Field(
        "before", description="norm before each branch; after it: x + norm(f(x)) (OLMo 2); or both (Gemma 2)"
    )
    parallel_block: bool = Field(False, description="attention and MLP read the same x, and both are added (GPT-NeoX)")
    norm_eps: float = Field(1e-5, gt=0, description="added to the variance (layernorm) or mean square (rmsnorm)")
    activation: ActivationName = Field("gelu", description="nonlinearity of the MLP; gelu_tanh is GPT-2's")
    position: PositionName = Field(
        "rope", description="learned: a table; rope: rotated queries and keys; none: the causal mask alone"
    )
    # When a context is extended, training continues with other frequencies.
    rope_base: Annotated[RopeBase, MEANT] = Field(10000.0, description="theta of RoPE (2104.09864)")
    rope_scaling: Annotated[RopeScaling | None, MEANT] = Field(
        None, description="change of RoPE's frequencies for longer contexts; null: none"
    )
    rotary_share: Share = Field(1.0, description="share of a head's elements that rotate, the first ones")
    window: Window | None = Field(None, description="keys that a query sees, its own among them; null: all before it")
    sinks: bool = Field(False, description="a learned logit per head in the softmax's denominator (gpt-oss)")
    attention_scale: float | None = Field(
        None, gt=0, description="factor of attention's logits; null: 1 / sqrt(head_dim)"
    )
    attention_softcap: float | None = Field(
        None, gt=0, description="c of attention's logits c tanh(logit / c) (Gemma 2); null: no cap"
    )
    embedding_multiplier: float = Field(
        1.0, gt=0, description="factor of the word embedding, rounded to precision.dtype (Gemma: sqrt(h); Granite)"
    )
    residual_multiplier: float = Field(
        1.0, gt=0, description="factor of each branch that is added to the residual stream (Granite)"
    )
    logit_divisor: float = Field(1.0, gt=0, description="logits are the head's product divided by it (Granite)")
    logit_softcap: float | None = Field(
        None, gt=0, description="c of logits c tanh(logit / c) of the head (Gemma 2); null: no cap"
    )
    z_loss: Annotated[float, MEANT] = Field(
        0.0,
        ge=0,
        description="factor of the mean log(sum of exp(logits))^2, trained but not printed (PaLM)",
    )
    tie_embeddings: bool = Field(True, description="the output head is the input embedding")
    bias: Literal["all", "qkv", "none"] = Field("all", description="linear layers that have a bias")
    qk_norm: Annotated[bool | Literal["all_heads"], BeforeValidator(_head_is_true)] = Field(
        False, description="RMSNorm of queries and keys before RoPE: over each head (true, or head), or over all_heads"
    )
    hidden_dropout: Annotated[float, MEANT] = Field(
        0.0, ge=0, lt=1, description="dropout after the embedding and on both residual branches"
    )
    attention_dropout: Annotated[float, MEANT] = Field(
        0.0, ge=0, lt=1, description="dropout on the attention probabilities"
    )
    # Initial weights matter only if nothing is loaded.
    init_std: Annotated[float, LAYOUT] = Field(
        0.02, gt=0, description="std of normal initial weights; residual projections: init_std / sqrt(2 num_layers)"
    )
    layers: list[str] | None = Field(
        None, description="kinds of the layers, such as [local*5, global]: repeated, cut at num_layers; null: all alike"
    )
    layer_kinds: dict[str, KindFields] = Field(
        default_factory=dict, description="by name, what differs from the model's: window, position, rope_*, sinks, mlp"
    )
    moe: MoEConfig | None = Field(None, description="experts of the layers of kind moe; null: no layer has any")
    mtp: MTPConfig | None = Field(
        None, description="multi-token prediction: layers that predict tokens further ahead; null: none"
    )
    extension: ExtensionConfig | None = Field(
        None, description="your Python module that replaces parts of the model (docs/extending.md); null: none"
    )

    @property
    def own(self) -> Extension:
        """Parts that the model's extension provides."""
        return OURS if self.extension is None else self.extension.read()

    @property
    def own_costs(self) -> OwnCosts:
        """Measured extra cost of a layer with the extension's parts over a built-in layer; `NO_COSTS` without an extension."""
        return NO_COSTS if self.extension is None else self.extension.costs

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Size of a query or a key, in elements."""
        if self.mla is not None:
            return self.mla.qk_head_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def value_size(self) -> int:
        """Size of a value, in elements."""
        return self.head_size if self.mla is None else self.mla.v_head_dim

    @property
    def heads_have_a_size(self) -> bool:
        """Whether the fields determine the head size; if not, a row of `DIVISIONS` is broken."""
        is_given = self.head_dim is not None or self.mla is not None
        return is_given or self.hidden_size % self.num_attention_heads == 0

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def norm_kind(self) -> Norm:
        return NORMS[self.norm]

    @property
    def norms_before(self) -> bool:
        return self.norm_placement != "after"

    @property
    def norms_after(self) -> bool:
        return self.norm_placement != "before"

    @property
    def activation_kind(self) -> Activation:
        return ACTIVATIONS[self.activation]

    @property
    def position_kind(self) -> Position:
        return POSITIONS[self.position]

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Each layer's record, in order; multi-token prediction layers follow the model's `num_layers`."""
        return kinds_of_layers(self)

    def layer_kind(self, layer: int) -> LayerKind:
        """Look up one layer's record."""
        return kind_of_layer(self, layer)

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return any(kind.has_experts for kind in self.kinds)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts, in order."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind.has_experts)

    @property
    def num_mtp_layers(self) -> int:
        """Number of multi-token prediction layers."""
        return 0 if self.mtp is None else self.mtp.num_layers

    @property
    def may_drop(self) -> bool:
        """Whether a part may drop elements: the model has dropout, or parts of an extension, which get the keys."""
        return bool(self.hidden_dropout or self.attention_dropout) or self.extension is not None

    @property
    def embedding_is_at_head(self) -> bool:
        """Whether the last stage needs the word embedding: as the output head, or for multi-token prediction."""
        return self.tie_embeddings or self.mtp is not None

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
