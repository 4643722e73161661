"""Rules as rows of a table: three kinds of rule that say the same about many fields.

    Need        a value of a field has an effect, or is allowed, only if a condition holds      engine/config/rules/needs.py
    Division    one number must be a multiple of another                                        engine/config/rules/sizes.py
    Limit       a number must be at most, or at least, what other fields make of it             engine/config/rules/sizes.py

A row is a `Rule`: called with a subject, it yields a problem if the rule is broken. It applies only if the section of its field is
given, so its functions may read that section. The row says in words what must hold; the legal values follow from its numbers.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from string import Formatter
from typing import Any

from triaxis.engine.config.rules.problem import Candidates, Problem, Subject, divisors, multiples, numbers, plain
from triaxis.engine.config.schema.dotted import value_of

Found = tuple[Mapping[str, Any], Candidates]
"""The numbers in a broken rule's words, and the values that may fix it."""


class _Words(Formatter):
    """Formats a value without a format specification as a user types it in YAML."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return str(super().format_field(value, format_spec)) if format_spec else plain(value)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A rule about one field.

    Attributes:
        key: the field's dotted name.
        rule: what must hold, and what would break; `{c.parallel.tp}` stands for that field's value.
        others: values that may fix the problem, by dotted name; those for `key` take the place of the row's own.
        advice: advice that no such value expresses.
    """

    key: str = field(kw_only=False)
    rule: str
    others: Candidates = field(default_factory=dict)
    advice: str = ""

    def __call__(self, subject: Subject) -> Iterator[Problem]:
        """Yield the problem if the rule is broken."""
        section, config = subject.config, subject.config
        *above, name = self.key.split(".")
        for each in above:
            section = getattr(section, each)
            if section is None:
                return
        value, default = getattr(section, name), type(section).model_fields[name].default
        if (found := self.broken(config, value, default)) is not None:
            in_words, candidates = found
            shown = in_words.get("size") if value is None else value
            rule = _Words().format(self.rule, c=config, **in_words)
            yield Problem(self.key, shown, rule, {**candidates, **self.others}, self.advice)

    def broken(self, config: Any, value: Any, default: Any) -> Found | None:
        """Check the rule for the field's value; return None if it holds."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Need(Row):
    """A condition without which some values of a field have no effect, or are not allowed.

    Attributes:
        is_met: test of the condition.
        values: values that need it; empty: all but the field's default and null, which turns it off.
    """

    is_met: Callable[[Any], bool]
    values: tuple[Any, ...] = ()

    def broken(self, config: Any, value: Any, default: Any) -> Found | None:
        needs_it = value in self.values if self.values else value not in (default, None)
        return ({}, {self.key: [default]}) if needs_it and not self.is_met(config) else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Division(Row):
    """A number, cut over ranks or not, whose part on each must be a multiple of another.

    In the words `{size}` is the number, `{part}` its part on a rank and `{by}` the divisor.

    Attributes:
        size: computes the number.
        by: computes the divisor; 0 if the rule does not apply.
        ranks: computes the number of ranks that the number is cut over.
        multiples, divisors, numbers: fields for which the nearest multiples of divisor x ranks, divisors of the number, or whole
            numbers may fix the problem.
    """

    size: Callable[[Any], int]
    by: Callable[[Any], int]
    ranks: Callable[[Any], int] = lambda _: 1
    multiples: tuple[str, ...] = ()
    divisors: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    def broken(self, config: Any, value: Any, default: Any) -> Found | None:
        by = self.by(config)
        if not by or (size := self.size(config)) % (by * (ranks := self.ranks(config))) == 0:
            return None

        def near(name: str) -> int:
            return int(value_of(config, name) or size)

        return {"size": size, "part": Fraction(size, ranks), "by": by}, {
            **{name: multiples(by * ranks, near(name)) for name in self.multiples},
            **{name: divisors(size, near(name)) for name in self.divisors},
            **{name: numbers(near(name)) for name in self.numbers},
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limit(Row):
    """A number that other fields limit; in the words the limit is `{limit}`. None is always allowed.

    Attributes:
        limit: computes the largest allowed number; None if the rule does not apply.
        is_least: True if the limit is the smallest allowed number.
        to: field that may take this field's value instead; "": none.
    """

    limit: Callable[[Any], float | None]
    is_least: bool = False
    to: str = ""

    def broken(self, config: Any, value: Any, default: Any) -> Found | None:
        limit = None if value is None else self.limit(config)
        if limit is None or (value >= limit if self.is_least else value <= limit):
            return None
        legal = [limit, None] if default is None else [limit]
        return {"limit": limit}, {self.key: legal, **({self.to: [value]} if self.to else {})}
