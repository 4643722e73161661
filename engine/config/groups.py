"""Groups of parameters: `optimizer.groups` and its rules.

    groups:                                                     the first group whose pattern matches a parameter's name has it
      - {match: "embedding.*", weight_decay: 0.0}
      - {match: "*.mlp.experts.*", lr_factor: 0.5}
      - {match: "layers.[0-3].*", freeze: true}

A pattern is that of a shell (`*`, `?`, `[0-3]`), over the whole name; `triaxis config params FILE` lists names and their groups. A
parameter of no group has the learning rate of the step, and decays by `weight_decay` where it is a matrix. A frozen parameter keeps
its value: its gradient is computed, counts in no norm and is not applied; it has no moments.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Required

from pydantic import BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

from triaxis.engine.config.counts import no_bool
from triaxis.engine.config.section import Problem, Rule, Subject

if TYPE_CHECKING:
    from triaxis.engine.config.training import OptimizerConfig


class GroupFields(TypedDict, total=False):
    """The fields of one group. A field that is absent is the optimizer's own."""

    __pydantic_config__ = ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)  # type: ignore[misc]

    match: Required[Annotated[str, Field(min_length=1)]]
    weight_decay: Annotated[float, Field(ge=0), BeforeValidator(no_bool)]
    lr_factor: Annotated[float, Field(gt=0), BeforeValidator(no_bool)]
    freeze: bool | None


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """The properties of a parameter's update besides the optimizer's own.

    Attributes:
        lr_factor: of the learning rate of the step.
        weight_decay: of the optimizer.
    """

    lr_factor: float
    weight_decay: float


def group_of(name: str, groups: Sequence[GroupFields]) -> int | None:
    """Return the number of the first group that matches a parameter's name; None: none does."""
    return next((number for number, group in enumerate(groups) if fnmatchcase(name, group["match"])), None)


def update_rule(name: str, optimizer: "OptimizerConfig", *, decays: bool) -> UpdateRule:
    """Return the rule of a parameter; one that `decays` does so where no group says otherwise."""
    number = group_of(name, optimizer.groups)
    group: GroupFields = {"match": name} if number is None else optimizer.groups[number]
    decay = group.get("weight_decay", optimizer.weight_decay if decays else 0.0)
    return UpdateRule(group.get("lr_factor", 1.0), decay)


def is_frozen(name: str, optimizer: "OptimizerConfig") -> bool:
    """Return whether a parameter keeps its value."""
    return is_frozen_by(name, optimizer.groups)


def is_frozen_by(name: str, groups: Sequence[GroupFields]) -> bool:
    """Return whether these groups keep the value of a parameter."""
    number = group_of(name, groups)
    return number is not None and bool(groups[number].get("freeze"))


def groups_change_something(subject: Subject) -> Iterator[Problem]:
    """Yield a problem for each group without a field, of a pattern that an earlier group has, or that freezes and updates."""
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
