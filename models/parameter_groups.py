"""Match a model's parameters to the entries of `optimizer.groups`."""

from collections.abc import Iterator
from dataclasses import dataclass

from triaxis.engine.config.quantities.update_settings import UpdateRule, group_of, is_frozen, update_rule
from triaxis.engine.config.rules.problem import Problem, Subject
from triaxis.engine.config.schema.training import OptimizerConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.shard_spec import ParamSpec
from triaxis.models.specs import model_specs


@dataclass(frozen=True, slots=True)
class GroupedParameter:
    """A parameter with its group.

    Attributes:
        number: index of the parameter's group in `optimizer.groups`, from 0; None: no group matches, or it never has gradients.
        rule: learning-rate factor and weight decay of its updates; None: the parameter is not trained.
        is_frozen: True if the group freezes the parameter.
    """

    spec: ParamSpec
    number: int | None
    rule: UpdateRule | None
    is_frozen: bool = False


def grouped_parameters(config: Config) -> list[GroupedParameter]:
    """List all parameters with their groups, in forward order."""
    return [_grouped(spec, config.optimizer) for spec in model_specs(config.model)]


def _grouped(spec: ParamSpec, optimizer: OptimizerConfig) -> GroupedParameter:
    number = group_of(spec.name, optimizer.groups)
    if is_frozen(spec.name, optimizer):
        return GroupedParameter(spec, number, None, is_frozen=True)
    if not spec.is_trained:
        return GroupedParameter(spec, None, None)
    return GroupedParameter(spec, number, update_rule(spec.name, optimizer, decays=spec.decay))


def groups_have_parameters(subject: Subject) -> Iterator[Problem]:
    """Yield a problem for each `optimizer.groups` entry that no trained or frozen parameter belongs to.

    Yield one more if no parameter is trained. Rules in `triaxis.engine.config` cannot read parameter names, so this rule applies
    only when a run is started or checked.
    """
    config = subject.config
    if not config.optimizer.groups:
        return
    found = grouped_parameters(config)
    used = {one.number for one in found}
    if all(one.rule is None for one in found):
        yield Problem(
            "optimizer.groups",
            ", ".join(group["match"] for group in config.optimizer.groups if group.get("freeze")),
            "freezes all parameters: no step would change the model",
            {},
            "Leave a group out, or put a narrower pattern with freeze: false before it.",
        )
    trained = [one for one in found if one.spec.is_trained]
    for number, group in enumerate(config.optimizer.groups):
        if number in used:
            continue
        taken = next((one for one in trained if group_of(one.spec.name, [group]) is not None), None)
        if taken is None:
            rule = "matches no parameter that is trained: the group would have no effect"
            advice = f"Names are like {trained[-1].spec.name}; `triaxis config params` lists them."
        else:
            earlier = config.optimizer.groups[taken.number or 0]["match"]
            rule = f"matches only parameters of earlier groups, such as {taken.spec.name} of {earlier}: it would have no effect"
            advice = "Put the narrower pattern first."
        yield Problem(f"optimizer.groups.{number}.match", group["match"], rule, {}, advice)
