"""Records for each kind of activation, norm and position, read by sizes, predictions and interop.

`engine/kernels/activations.py` and `norms.py` compute each kind under the same name; docs/extending.md explains how to add a kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ActivationName = Literal["gelu", "gelu_tanh", "relu2", "swiglu", "geglu", "geglu_tanh"]
NormName = Literal["layernorm", "rmsnorm", "rmsnorm_1p"]
PositionName = Literal["learned", "rope", "none"]


@dataclass(frozen=True, slots=True)
class Activation:
    """The nonlinearity in an MLP with inner width f. Its kernel keeps only its input for the backward.

    Attributes:
        name: value in `model.activation`.
        pointwise: name of the function that is applied to each number; in a gated MLP, to each number of the gate.
        is_gated: True: [gate | up], 2 f wide -> pointwise(gate) * up, f wide (2002.05202); False: f wide -> f wide.
        hugging_face: names in a config.json; an export writes the first.
        megatron: Megatron-LM's switch for it; "" if it is Megatron-LM's default; None if Megatron-LM has no such activation.
    """

    name: ActivationName
    pointwise: str
    is_gated: bool
    hugging_face: tuple[str, ...]
    megatron: str | None

    @property
    def num_inputs(self) -> int:
        """Number of vectors [f] per token that the first projection computes, each with one [f, h] matrix in its weight."""
        return 2 if self.is_gated else 1


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the hidden size h. Its kernel keeps its input and a few numbers per token for the backward.

    Attributes:
        name: value in `model.norm`.
        parameters: vectors [h], in the order in which the kernel takes them.
        statistics: names of the numbers per token that are kept for the backward.
        statistics_dtype: dtype of these numbers: the run's or the accumulation dtype.
        offset: number that the kernel adds to the stored weight, in the accumulation dtype. With 1, the stored weight starts at 0.
        of_heads: norm that a model with this norm uses for queries and keys (`model.qk_norm`).
        megatron: Megatron-LM's `normalization`. None: Megatron-LM has no such norm.
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
    """A way to give the model each token's position.

    Attributes:
        name: value in `model.position`.
        has_table: True: one learned vector [h] per position, so samples are at most `model.seq_length` long.
        is_rotary: True: queries and keys are rotated (RoPE, 2104.09864).
        megatron: Megatron-LM's `position_embedding_type`. None: Megatron-LM has no such positions.
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
    # Gemma's norm. A weight near 1 has few bits left for its distance from 1, so the distance itself is stored.
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
