"""The shares of an operand's numbers that FP8 loses (no torch here); `triaxis.engine.tensor_parallel.fp8_shares` counts them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Role = Literal["input", "gradient", "weight"]

ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class Lost:
    """The shares of one operand of a linear layer in a step, 0 to 1, of its numbers that are not zero.

    Attributes:
        underflow: rounded to zero.
        overflow: clamped to the largest number of the format, from beyond what would be rounded to it.
    """

    underflow: float
    overflow: float


LostByLinear = Mapping[str, Mapping[Role, Lost]]
"""Shares by the name of a linear layer with FP8 (`layers.0.mlp.down`), then by operand, where it has numbers other than zero."""
