"""Names the roles of a linear layer's FP8 operands."""

from typing import Literal, get_args

Role = Literal["input", "gradient", "weight"]

ROLES: tuple[Role, ...] = get_args(Role)
