"""How a broken rule becomes a message with values that are really legal (no torch here).

    rule(subject)  ->  Problem(key, value, what must hold and what would break, candidate values, nearest first)
                                                                            |
       each candidate is put into the config and all rules run again:  gone, and nothing new broken  ->  it is named

so a message never sends its reader from one mistake into the next. Where several broken rules could be mended by the same field,
values that mend all of those come first, and values outside the bounds of the field are left out.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

from engine.config.plan import data_parallel_size
from engine.config.schema import Config
from engine.config.section import Section

NUM_NAMED = 2
"""Legal values named per field."""
NUM_TRIED = 64
"""Candidates tried per field before none is named."""

MOST_DIVIDED = 10_000
"""Divisors are searched up to here, and with them those at the other end."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What the rules look at: the config, and the cluster as far as it is known."""

    config: Config
    world_size: int | None
    ranks_per_node: int | None

    @property
    def dp(self) -> int | None:
        """The data-parallel size; None where it is open or does not exist."""
        return data_parallel_size(self.config.parallel, self.world_size)


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule.

    Attributes:
        key: dotted name of the field that the rule is about.
        value: what it is.
        rule: what must hold, and what would have broken.
        candidates: by dotted name, values that may mend it, nearest first.
        advice: what to do besides, or where no value of a field says it; a function where it takes long to find.
    """

    key: str
    value: object
    rule: str
    candidates: Mapping[str, Iterable[object]] = field(default_factory=dict)
    advice: str | Callable[[], str] = ""

    def __str__(self) -> str:
        legal = "; ".join(
            f"{name} = {' or '.join(map(_plain, values))}" for name, values in self.candidates.items() if values
        )
        parts = [f"{self.key} = {_plain(self.value)}: {self.rule}."]
        parts += [f"Nearest legal: {legal}."] if legal else []
        advice = self.advice() if callable(self.advice) else self.advice
        parts += [advice] if advice else []
        return " ".join(parts)


Rule = Callable[[Subject], Iterator[Problem]]


def find_problems(subject: Subject, rules: Sequence[Rule]) -> list[Problem]:
    """Every broken rule, its candidates cut down to the nearest that are legal."""
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
    """Find the rules that are broken, each with the field that it is about."""
    return {(rule, problem.key) for rule, problem in _broken(subject, rules)}


def _broken(subject: Subject, rules: Sequence[Rule]) -> Iterator[tuple[Rule, Problem]]:
    for rule in rules:
        try:
            yield from ((rule, problem) for problem in rule(subject))
        except AttributeError:
            # A field without a valid value has been reported, and is missing here: what needs it cannot be said.
            if is_whole(subject.config):
                raise


def _mends(subject: Subject, rules: Sequence[Rule], name: str, value: object, others: Set[tuple[Rule, str]]) -> bool:
    """Whether the field's new value removes the problem and brings none that was not there before."""
    changed = replace(subject, config=with_value(subject.config, name, value))
    return all((rule, problem.key) in others for rule, problem in _broken(changed, rules))


def is_whole(config: Config) -> bool:
    """Whether every field has a value; where the reading found wrong types, those fields have none."""
    sections = [getattr(config, name, None) for name in Config.model_fields]
    return all(
        section is not None and all(name in section.__dict__ for name in type(section).model_fields)
        for section in sections
    )


_Section = TypeVar("_Section", bound=Section)


def with_value(section: _Section, dotted: str, value: object) -> _Section:
    """The config (or a section of it) with one field changed, `train.steps` or `telemetry.profile.start`."""
    name, _, rest = dotted.partition(".")
    changed = with_value(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: changed})


def multiples(of: int, near: int) -> Iterator[int]:
    """Positive multiples of `of`, nearest to `near` first, the smaller of two before the larger."""
    below, above = near // of * of, (near // of + 1) * of
    while True:
        if below > 0 and near - below <= above - near:
            yield below
            below -= of
        else:
            yield above
            above += of


def divisors(number: int, near: int) -> Iterator[int]:
    """Divisors of `number`, nearest to `near` first, the smaller of two before the larger."""
    # Bounded, so that a slip such as a number with ten zeros too many is answered at once too.
    small = [d for d in range(1, min(math.isqrt(number), MOST_DIVIDED) + 1) if number % d == 0]
    yield from sorted({*small, *(number // d for d in small)}, key=lambda d: (abs(d - near), d))


def numbers(near: int, least: int = 1) -> Iterator[int]:
    """Whole numbers from `least` on, nearest to `near` first, the smaller of two before the larger."""
    return (number + least - 1 for number in multiples(1, near - least + 1))


def _plain(value: Any) -> str:
    """A value as one would type it in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value or "''"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
