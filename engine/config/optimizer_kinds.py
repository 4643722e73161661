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
class OptimizerKind:
    """One optimizer, as far as checkpoints, predictions, rules and interop need it.

    Attributes:
        title: for messages.
        moments: by name in checkpoints, the field of `optimizer` that says how fast it decays. Each is as large as the
            parameter and starts from zero.
        fields: the fields of `optimizer` that this optimizer alone reads, with their names elsewhere, Megatron-LM's first.
        megatron: the value of Megatron-LM's `--optimizer`.
    """

    title: str
    moments: Mapping[StateKind, str]
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
            moments={"exp_avg": "beta1", "exp_avg_sq": "beta2"},
            fields={"beta1": ("adam_beta1",), "beta2": ("adam_beta2",), "eps": ("adam_eps", "adam_epsilon")},
            megatron="adam",
        ),
        "sgd": OptimizerKind(
            title="SGD with momentum",
            moments={"momentum_buffer": "momentum"},
            fields={"momentum": ("sgd_momentum",)},
            megatron="sgd",
        ),
    }
)

STATE_KINDS: tuple[StateKind, ...] = tuple(
    dict.fromkeys(one for kind in OPTIMIZERS.values() for one in kind.state_kinds)
)
"""The kinds of all optimizers, each once."""
