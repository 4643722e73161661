"""Parameter groups: `optimizer.groups` and its rules.

    groups:                                                     a parameter belongs to the first group whose pattern matches it
      - {match: "embedding.*", weight_decay: 0.0}
      - {match: "*.mlp.experts.*", lr_factor: 0.5}
      - {match: "layers.[0-3].*", freeze: true}

Patterns are shell patterns (`*`, `?`, `[0-3]`) over the whole name; `triaxis config params FILE` lists names and their groups. A
parameter outside all groups has the step's learning rate, and decays by `weight_decay` if it is a matrix. A frozen parameter keeps
its value and has no moments: its gradient is computed, but is neither applied nor counted in the gradient norm.
"""

from collections.abc import Iterator
from typing import Annotated, Required

from pydantic import BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

from triaxis.engine.config.counts import no_bool
from triaxis.engine.config.problem import Problem, Rule, Subject


class GroupFields(TypedDict, total=False):
    """One group's fields. An absent field has the optimizer's value."""

    __pydantic_config__ = ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)  # type: ignore[misc]

    match: Required[Annotated[str, Field(min_length=1)]]
    weight_decay: Annotated[float, Field(ge=0), BeforeValidator(no_bool)]
    lr_factor: Annotated[float, Field(gt=0), BeforeValidator(no_bool)]
    freeze: bool | None


def groups_change_something(subject: Subject) -> Iterator[Problem]:
    """Yield a problem for each group that has no field, repeats an earlier pattern, or both freezes and updates."""
    seen: set[str] = set()
    for number, group in enumerate(subject.config.optimizer.groups):
        pattern, key = group["match"], f"optimizer.groups.{number}.match"
        if len(group) == 1:
            yield Problem(
                key,
                pattern,
                "has none of weight_decay, lr_factor and freeze: its parameters would be as those of no group",
                {},
                "Give the group one of them, or leave it out.",
            )
        of_updates = [name for name in ("weight_decay", "lr_factor") if name in group]
        if group.get("freeze") and of_updates:
            yield Problem(
                key,
                pattern,
                f"freezes its parameters, so {' and '.join(of_updates)} would have no effect: they are never updated",
                {},
                f"Leave out freeze, or {' and '.join(of_updates)}.",
            )
        if pattern in seen:
            yield Problem(
                key,
                pattern,
                "is the pattern of two groups, of which the first has all that match: the other would have no effect",
                {},
                "Put the fields of both into one group.",
            )
        seen.add(pattern)


GROUP_RULES: tuple[Rule, ...] = (groups_change_something,)
