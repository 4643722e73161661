"""Parameter groups: `optimizer.groups`.

    groups:                                                     a parameter belongs to the first group whose pattern matches it
      - {match: "embedding.*", weight_decay: 0.0}
      - {match: "*.mlp.experts.*", lr_factor: 0.5}
      - {match: "layers.[0-3].*", freeze: true}

Patterns are shell patterns (`*`, `?`, `[0-3]`) over the whole name; `triaxis config params FILE` lists names and their groups. A
parameter outside all groups has the step's learning rate, and decays by `weight_decay` if it is a matrix. A frozen parameter keeps
its value and has no moments: its gradient is computed, but is neither applied nor counted in the gradient norm.
"""

from typing import Annotated, Required

from pydantic import BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

from triaxis.engine.config.values.counts import no_bool


class GroupFields(TypedDict, total=False):
    """One group's fields. An absent field has the optimizer's value."""

    __pydantic_config__ = ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)  # type: ignore[misc]

    match: Required[Annotated[str, Field(min_length=1)]]
    weight_decay: Annotated[float, Field(ge=0), BeforeValidator(no_bool)]
    lr_factor: Annotated[float, Field(gt=0), BeforeValidator(no_bool)]
    freeze: bool | None
