"""Every rule checked at once.

A broken rule becomes a message that names only legal values.

    rule(subject)  ->  Problem(key, value, what must hold and what would break, candidate values, nearest first)
                                                                            |
       each candidate is put into the config and all rules run again:  gone, and nothing new broken  ->  it is named

So a message never leads from one mistake into the next. If one field could fix several broken rules, and some of its values fix all
of them, only those values are named. Values outside the field's bounds are left out.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import islice

from triaxis.engine.config.quantities.run_phases import at_phase
from triaxis.engine.config.rules.data import DATA_RULES
from triaxis.engine.config.rules.extension import EXTENSION_RULES
from triaxis.engine.config.rules.graphs import GRAPH_RULES
from triaxis.engine.config.rules.layer_kinds import LAYER_KIND_RULES
from triaxis.engine.config.rules.layout import LAYOUT_RULES
from triaxis.engine.config.rules.moe import MOE_RULES
from triaxis.engine.config.rules.needs import NEEDS
from triaxis.engine.config.rules.phases import PHASE_RULES
from triaxis.engine.config.rules.problem import Problem, Rule, Subject
from triaxis.engine.config.rules.recompute import RECOMPUTE_RULES
from triaxis.engine.config.rules.run import RUN_RULES
from triaxis.engine.config.rules.sizes import DIVISIONS, LIMITS
from triaxis.engine.config.rules.telemetry import TELEMETRY_RULES
from triaxis.engine.config.rules.training import TRAINING_RULES
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.tree import Config, is_whole
from triaxis.engine.errors import ConfigError

NUM_NAMED = 2
"""Maximum number of legal values that a message names per field."""

NUM_TRIED = 64
"""Maximum number of candidates that are tried per field."""

RULES: tuple[Rule, ...] = (
    *DIVISIONS,
    *LAYER_KIND_RULES,
    *EXTENSION_RULES,
    *MOE_RULES,
    *DATA_RULES,
    *LAYOUT_RULES,
    *LIMITS,
    *NEEDS,
    *GRAPH_RULES,
    *TRAINING_RULES,
    *RECOMPUTE_RULES,
    *RUN_RULES,
    *TELEMETRY_RULES,
    *PHASE_RULES,
)
"""The rules that need only the configuration: three tables of them, and others by section."""


def problems(
    config: Config, world_size: int | None = None, ranks_per_node: int | None = None, more_rules: Sequence[Rule] = ()
) -> list[str]:
    """List every broken rule as a readable line; an empty list means a legal config, in all the run's phases.

    Args:
        config: config to check.
        world_size: number of ranks in the run; None: what the config implies. Rules that need an unknown number are skipped.
        ranks_per_node: number of ranks on each node; None: `runtime.ranks_per_node`.
        more_rules: further rules, checked last.
    """
    found = [str(problem) for problem in broken_rules(config, world_size, ranks_per_node, more_rules)]
    if not is_whole(config):
        return found
    for name in (entry["name"] for entry in config.phases if entry["name"] != config.train.phase):
        here = broken_rules(at_phase(config, name), world_size, ranks_per_node, more_rules)
        found += [f"phase {name}: {problem}" for problem in map(str, here) if problem not in found]
    return found


def is_legal(
    config: Config, world_size: int | None, ranks_per_node: int | None, more_rules: Sequence[Rule] = ()
) -> bool:
    """Whether the config has no `problems`; faster than listing them, because no legal values are looked for."""
    phases = (config, *(at_phase(config, entry["name"]) for entry in config.phases))
    rules = (*RULES, *more_rules)
    return not any(broken_keys(Subject(each, world_size, ranks_per_node), rules) for each in phases)


def require_legal(
    config: Config, source: str, world_size: int | None, ranks_per_node: int | None, more_rules: Sequence[Rule] = ()
) -> None:
    """Raise ConfigError with all `problems` in the config that was read from `source`, if there are any."""
    if found := problems(config, world_size, ranks_per_node, more_rules):
        raise ConfigError(found, source)


def broken_rules(
    config: Config, world_size: int | None = None, ranks_per_node: int | None = None, more_rules: Sequence[Rule] = ()
) -> list[Problem]:
    """List the broken rules as `Problem` records whose candidates are the nearest legal values, at most `NUM_NAMED` per field."""
    subject, rules = Subject(config, world_size, ranks_per_node), (*RULES, *more_rules)
    broken = {(rule, problem.key): problem for rule, problem in _broken(subject, rules)}
    found = []
    for key, problem in broken.items():
        others = broken.keys() - {key}
        named: dict[str, Iterable[object]] = {}
        for name, values in problem.candidates.items():
            tried = [value for value in islice(values, NUM_TRIED) if Config.is_in_bounds(name, value)]
            elsewhere = {other for other in others if name not in broken[other].candidates}
            for may_stay in (elsewhere, others) if elsewhere != others else (others,):
                mending = (value for value in tried if _mends(subject, rules, name, value, may_stay))
                if legal := tuple(islice(mending, NUM_NAMED)):
                    named[name] = legal
                    break
        found.append(replace(problem, candidates=named))
    return found


def broken_keys(subject: Subject, rules: Sequence[Rule]) -> set[tuple[Rule, str]]:
    """Collect (rule, the field's dotted name) for each broken rule."""
    return {(rule, problem.key) for rule, problem in _broken(subject, rules)}


def _broken(subject: Subject, rules: Sequence[Rule]) -> Iterator[tuple[Rule, Problem]]:
    for rule in rules:
        try:
            yield from ((rule, problem) for problem in rule(subject))
        except AttributeError:
            # A field with the wrong type was reported and is missing here, so rules that read it are skipped.
            if is_whole(subject.config):
                raise


def _mends(subject: Subject, rules: Sequence[Rule], name: str, value: object, others: Set[tuple[Rule, str]]) -> bool:
    """Whether the config with `value` in the field `name` breaks no rules except `others`."""
    changed = replace(subject, config=with_value(subject.config, name, value))
    return all((rule, problem.key) in others for rule, problem in _broken(changed, rules))
