"""The form of rules: what they judge, and what they find.

    problems(config, world_size=16, ranks_per_node=8)  ->
      ["model.num_attention_heads = 10: must be a multiple of parallel.tp = 4: a tensor-parallel rank computes whole heads, and
        they could not be dealt out evenly. Nearest legal: model.num_attention_heads = 8 or 12; parallel.tp = 5 or 2."]

A rule is a function of a `Subject` that yields a `Problem` for each violation: what must hold, and what would have broken.
`engine/config/rules/check.py` checks all rules at once.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from triaxis.engine.config.quantities.plan import data_parallel_size
from triaxis.engine.config.schema.dotted import value_of
from triaxis.engine.config.tree import Config

MOST_DIVIDED = 10_000
"""Largest number that `divisors` tries as a divisor; each divisor found also gives the larger one, number // divisor."""

Candidates = Mapping[str, Iterable[object]]
Advice = str | Callable[[], str]


@dataclass(frozen=True, slots=True)
class Subject:
    """A rule's input: the config, and the numbers of ranks in the run and on each node (None: not known)."""

    config: Config
    world_size: int | None
    ranks_per_node: int | None

    @property
    def dp(self) -> int | None:
        """The data-parallel size; None if it is not known yet, or if no size fills the ranks."""
        return data_parallel_size(self.config.parallel, self.world_size)

    def problem(self, key: str, rule: str, candidates: Candidates | None = None, advice: Advice = "") -> "Problem":
        """Build a field's `Problem`, with the field's value in the config."""
        return Problem(key, value_of(self.config, key), rule, candidates or {}, advice)


@dataclass(frozen=True, slots=True)
class Problem:
    """A broken rule.

    Attributes:
        key: the field's dotted name.
        value: the field's value.
        rule: what must hold, and what would have broken.
        candidates: values that may fix the problem, nearest first, by the dotted name of the field to change.
        advice: advice that no candidate expresses; a function that returns it if it takes long to compute.
    """

    key: str
    value: object
    rule: str
    candidates: Candidates = field(default_factory=dict)
    advice: Advice = ""

    def __str__(self) -> str:
        legal = "; ".join(
            f"{name} = {' or '.join(map(plain, values))}" for name, values in self.candidates.items() if values
        )
        parts = [f"{self.key} = {plain(self.value)}: {self.rule}."]
        parts += [f"Nearest legal: {legal}."] if legal else []
        advice = self.advice() if callable(self.advice) else self.advice
        parts += [advice] if advice else []
        return " ".join(parts)


Rule = Callable[[Subject], Iterator[Problem]]


def multiples(of: int, near: int) -> Iterator[int]:
    """Yield positive multiples of `of`, nearest to `near` first; at equal distance the smaller comes first."""
    below, above = near // of * of, (near // of + 1) * of
    while True:
        if below > 0 and near - below <= above - near:
            yield below
            below -= of
        else:
            yield above
            above += of


def divisors(number: int, near: int) -> Iterator[int]:
    """Yield divisors of `number`, nearest to `near` first; at equal distance the smaller comes first."""
    # Bounded, so that a number with ten zeros too many does not take long either.
    small = [d for d in range(1, min(math.isqrt(number), MOST_DIVIDED) + 1) if number % d == 0]
    yield from sorted({*small, *(number // d for d in small)}, key=lambda d: (abs(d - near), d))


def numbers(near: int, least: int = 1) -> Iterator[int]:
    """Yield whole numbers from `least` on, nearest to `near` first; at equal distance the smaller comes first."""
    return (number + least - 1 for number in multiples(1, near - least + 1))


def plain(value: Any) -> str:
    """Format a value as a user types it in YAML; fields of a section or corpus that have their default are left out."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value or "''"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(plain, value))}]"
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {plain(inner)}' for key, inner in value.items())}}}"
    return f"{value:g}" if isinstance(value, float) else str(value)
