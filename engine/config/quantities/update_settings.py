"""Each parameter's settings for an update, by the group that it belongs to (`engine/config/schema/groups.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from triaxis.engine.config.schema.groups import GroupFields
from triaxis.engine.config.schema.training import OptimizerConfig


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """One parameter's settings for an update, besides those that the optimizer has for all parameters.

    Attributes:
        lr_factor: multiplier on the step's learning rate.
        weight_decay: decay coefficient; 0: no decay.
    """

    lr_factor: float
    weight_decay: float


def group_of(name: str, groups: Sequence[GroupFields]) -> int | None:
    """Index of the first group whose pattern matches a parameter's name; None if there is none."""
    return next((number for number, group in enumerate(groups) if fnmatchcase(name, group["match"])), None)


def update_rule(name: str, optimizer: OptimizerConfig, *, decays: bool) -> UpdateRule:
    """Build the update rule for the parameter `name`.

    If its group sets a weight decay, that applies. If not, the optimizer's applies if `decays` is True, and none otherwise.
    """
    number = group_of(name, optimizer.groups)
    group: GroupFields = {"match": name} if number is None else optimizer.groups[number]
    decay = group.get("weight_decay", optimizer.weight_decay if decays else 0.0)
    return UpdateRule(group.get("lr_factor", 1.0), decay)


def is_frozen(name: str, optimizer: OptimizerConfig) -> bool:
    """Whether the optimizer's groups freeze a parameter, so that it keeps its value."""
    return is_frozen_by(name, optimizer.groups)


def is_frozen_by(name: str, groups: Sequence[GroupFields]) -> bool:
    """Whether these groups freeze a parameter."""
    number = group_of(name, groups)
    return number is not None and bool(groups[number].get("freeze"))
