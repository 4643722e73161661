"""Records of the kinds of activation, norm and position, read by sizes, predictions and interop.

The functions have the same names in `engine/kernels/activations.py` and `norms.py`; docs/extending.md is the recipe for another.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ActivationName = Literal["gelu", "gelu_tanh", "relu2", "swiglu", "geglu", "geglu_tanh"]
NormName = Literal["layernorm", "rmsnorm", "rmsnorm_1p"]
PositionName = Literal["learned", "rope", "none"]


@dataclass(frozen=True, slots=True)
class Activation:
    """A nonlinearity of an MLP of inner width f. Its kernel keeps its input, and nothing else, for the backward.

    Attributes:
        name: in `model.activation`.
        pointwise: function of one number; in a gated MLP it is applied to the gate.
        is_gated: [gate | up], 2 f wide -> pointwise(gate) * up, f wide (2002.05202); otherwise f wide -> f wide.
        hugging_face: names in a config.json; an export writes the first.
        megatron: switch of Megatron-LM; "": its default. None: Megatron-LM has no such activation.
    """

    name: ActivationName
    pointwise: str
    is_gated: bool
    hugging_face: tuple[str, ...]
    megatron: str | None

    @property
    def num_inputs(self) -> int:
        """Return the number of vectors [f] per token that the first projection makes: matrices [f, h] of its weight."""
        return 2 if self.is_gated else 1


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the hidden size h. Its kernel keeps its input and a few numbers per token for the backward.

    Attributes:
        name: in `model.norm`.
        parameters: vectors [h], in the order in which the kernel takes them.
        statistics: numbers per token that are kept.
        statistics_dtype: dtype of those, the run's or the accumulation dtype.
        offset: number that the kernel adds to the stored weight, in the accumulation dtype; 1: the stored weight starts at 0.
        of_heads: norm of queries and keys in a model with this norm.
        megatron: `normalization` of Megatron-LM. None: Megatron-LM has no such norm.
    """

    name: NormName
    parameters: tuple[Literal["weight", "bias"], ...]
    statistics: tuple[str, ...]
    statistics_dtype: Literal["run", "accumulation"]
    offset: Literal[0, 1]
    of_heads: Literal["rmsnorm", "rmsnorm_1p"]
    megatron: str | None


@dataclass(frozen=True, slots=True)
class Position:
    """A way in which a token's position enters the model.

    Attributes:
        name: in `model.position`.
        has_table: one learned vector [h] per position, so samples are at most `model.seq_length` long.
        is_rotary: queries and keys are rotated (RoPE, 2104.09864).
        megatron: `position_embedding_type` of Megatron-LM. None: Megatron-LM has no such positions.
    """

    name: PositionName
    has_table: bool
    is_rotary: bool
    megatron: str | None


_ACTIVATIONS = (
    Activation("gelu", "gelu", False, ("gelu",), ""),
    Activation("gelu_tanh", "gelu_tanh", False, ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "openai_gelu"),
    Activation("relu2", "relu2", False, ("relu2",), "squared_relu"),
    Activation("swiglu", "silu", True, ("silu", "swish"), "swiglu"),
    Activation("geglu", "gelu", True, ("gelu",), None),
    Activation("geglu_tanh", "gelu_tanh", True, ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), None),
)
_NORMS = (
    # torch's own kernel on the CPU returns its statistics in the input's dtype.
    Norm("layernorm", ("weight", "bias"), ("mean", "deviation"), "run", 0, "rmsnorm", "LayerNorm"),
    Norm("rmsnorm", ("weight",), ("deviation",), "accumulation", 0, "rmsnorm", "RMSNorm"),
    # Gemma's. A weight near 1 has fewer bits left for its distance from 1 than the distance itself, so that is what is stored.
    Norm("rmsnorm_1p", ("weight",), ("deviation",), "accumulation", 1, "rmsnorm_1p", None),
)
_POSITIONS = (
    Position("learned", has_table=True, is_rotary=False, megatron="learned_absolute"),
    Position("rope", has_table=False, is_rotary=True, megatron="rope"),
    Position("none", has_table=False, is_rotary=False, megatron="none"),
)

ACTIVATIONS: Mapping[str, Activation] = {kind.name: kind for kind in _ACTIVATIONS}
NORMS: Mapping[str, Norm] = {kind.name: kind for kind in _NORMS}
POSITIONS: Mapping[str, Position] = {kind.name: kind for kind in _POSITIONS}
