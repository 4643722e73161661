"""The operands of a linear layer in FP8."""

from typing import Literal, get_args

Role = Literal["input", "gradient", "weight"]

ROLES: tuple[Role, ...] = get_args(Role)
