"""Lists the roles of a linear layer's FP8 operands: input, gradient and weight."""

from typing import Literal, get_args

Role = Literal["input", "gradient", "weight"]

ROLES: tuple[Role, ...] = get_args(Role)
