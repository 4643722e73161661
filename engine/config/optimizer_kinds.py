"""The optimizers: what each keeps of a parameter, and which fields of the configuration it reads (no torch here).

An optimizer is a record here, its arithmetic in `updates.py`, and its own fields in `engine.config.training.OptimizerConfig`
(docs/extending.md, "An optimizer").
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

OptimizerName = Literal["adamw", "sgd"]

StateKind = str
"""`master`, or the name of a moment: what a rank keeps of each parameter that it owns, and a checkpoint holds."""

MASTER: StateKind = "master"
"""The exact weights, which every optimizer has; in fp32 and float64 runs the parameters themselves."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A decaying mean over the steps of a power of the gradient.

    Attributes:
        decay: the field of `optimizer` that says how fast it decays.
        power: of the gradient, element by element: 1 or 2.
    """

    decay: str
    power: int


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """One optimizer, as far as checkpoints, predictions, rules and interop need it.

    Attributes:
        title: for messages.
        moments: by name in checkpoints. Each is as large as the parameter and starts from zero.
        fields: the fields of `optimizer` that this optimizer alone reads, with their names elsewhere, Megatron-LM's first.
        megatron: the value of Megatron-LM's `--optimizer`.
    """

    title: str
    moments: Mapping[StateKind, Moment]
    fields: Mapping[str, tuple[str, ...]]
    megatron: str

    @property
    def state_kinds(self) -> tuple[StateKind, ...]:
        """The master and the moments, in the order in which they are saved."""
        return (MASTER, *self.moments)


OPTIMIZERS: Mapping[OptimizerName, OptimizerKind] = MappingProxyType(
    {
        "adamw": OptimizerKind(
            title="AdamW",
            moments={"exp_avg": Moment("beta1", power=1), "exp_avg_sq": Moment("beta2", power=2)},
            fields={"beta1": ("adam_beta1",), "beta2": ("adam_beta2",), "eps": ("adam_eps", "adam_epsilon")},
            megatron="adam",
        ),
        "sgd": OptimizerKind(
            title="SGD with momentum",
            moments={"momentum_buffer": Moment("momentum", power=1)},
            fields={"momentum": ("sgd_momentum",)},
            megatron="sgd",
        ),
    }
)

STATE_KINDS: tuple[StateKind, ...] = tuple(
    dict.fromkeys(one for kind in OPTIMIZERS.values() for one in kind.state_kinds)
)
"""The kinds of all optimizers, each once."""

MOMENTS: Mapping[StateKind, Moment] = MappingProxyType(
    {name: moment for kind in OPTIMIZERS.values() for name, moment in kind.moments.items()}
)
"""The moments of all optimizers, by name; a name means the same in each."""
