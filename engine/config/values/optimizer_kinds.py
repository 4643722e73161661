"""The optimizers: each one's state, and the config fields that only it reads.

An optimizer consists of a record here, its arithmetic in `updates.py`, and its own fields in
`triaxis.engine.config.schema.training.OptimizerConfig` (docs/extending.md, "An optimizer").
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

OptimizerName = Literal["adamw", "sgd", "extension"]

StateKind = str
"""`master`, a moment's name, or `ema`: a kind of state that a rank keeps for its parameters and a checkpoint holds."""

KIND_PATTERN = "[a-z][a-z0-9_]{0,31}"
"""Regular expression for a state kind."""

MASTER: StateKind = "master"
"""The exact weights, which every optimizer has; in fp32 and float64 runs they are the parameters themselves."""

EMA: StateKind = "ema"
"""The master's moving average, which any optimizer can have; it exists if `optimizer.ema` is given."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A state tensor that averages a power of the gradient over steps, with a decay rate.

    Attributes:
        decay: the `optimizer` field with its decay rate.
        power: exponent on the gradient, element by element: 1 or 2.
    """

    decay: str
    power: int


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """An optimizer, as checkpoints, predictions, rules and interop see it.

    Attributes:
        title: name in messages.
        moments: moments by their names in checkpoints. Each has the parameter's size and starts at zero.
        fields: the `optimizer` fields that only this optimizer reads, each with its names in other engines, Megatron-LM's first.
        megatron: value for Megatron-LM's `--optimizer`; None: Megatron-LM does not have this optimizer.
    """

    title: str
    moments: Mapping[StateKind, Moment]
    fields: Mapping[str, tuple[str, ...]]
    megatron: str | None

    @property
    def state_kinds(self) -> tuple[StateKind, ...]:
        """The master and the moments, in saving order."""
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
        # Its moments are recorded in `model.extension.moments`, and its rule may read every field.
        "extension": OptimizerKind(title="the extension's update rule", moments={}, fields={}, megatron=None),
    }
)


def state_kinds(name: OptimizerName, own: Sequence[StateKind], *, has_ema: bool) -> tuple[StateKind, ...]:
    """List a trained parameter's state kinds, in saving order; `own` are an extension's moments."""
    kinds = (MASTER, *own) if name == "extension" else OPTIMIZERS[name].state_kinds
    return (*kinds, EMA) if has_ema else kinds


MOMENTS: Mapping[StateKind, Moment] = MappingProxyType(
    {name: moment for kind in OPTIMIZERS.values() for name, moment in kind.moments.items()}
)
"""All optimizers' moments by name; a name means the same in each optimizer."""
