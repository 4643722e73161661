"""The base class for sections, and the form that their rules take.

    problems(config, world_size=16, ranks_per_node=8)  ->
      ["model.num_attention_heads = 10: must be a multiple of parallel.tp = 4: a tensor-parallel rank computes whole heads, and
        they could not be dealt out evenly. Nearest legal: model.num_attention_heads = 8 or 12; parallel.tp = 5 or 2."]

A section is one class in one file. Its fields have types, bounds and descriptions; a field or its section also states whether a
resumed run may change it (`OnResume`). Rules that relate fields to each other follow the class. A rule is a function that yields a
`Problem` for each violation: what must hold, and what would have broken. `engine/config/tree.py` checks all rules at once.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import ge, gt, le, lt
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from triaxis.engine.config.counts import has_bool
from triaxis.engine.config.plan import data_parallel_size

if TYPE_CHECKING:  # the tree imports every section
    from triaxis.engine.config.tree import Config

LARGEST_WIDTH = 2**24
"""Maximum width in elements: of the residual stream, the MLP, an expert, a head or a latent."""

LONGEST_SEQUENCE = 2**30
"""Maximum number of tokens in a sample, a window or a context."""

MOST_DIVIDED = 10_000
"""Largest number that `divisors` tries as a divisor; each divisor found also gives the larger one, number // divisor."""

Verdict = Literal["layout", "meant", "never"]
Candidates = Mapping[str, Iterable[object]]
Advice = str | Callable[[], str]


@dataclass(frozen=True, slots=True)
class OnResume:
    """The rule for a field that differs between a saved run and the run that resumes it.

        layout    the field affects speed only: a difference is always allowed, and printed
        meant     the run becomes another one, which may be intended: allowed if `checkpoint.accept` names the field
        never     the weights or the position in the data would mean something else: always refused

    Attributes:
        verdict: one of these three words.
        is_layout: test on the new configuration; if it returns True, the verdict is `layout` instead. None: no test.
    """

    verdict: Verdict
    is_layout: "Callable[[Subject], bool] | None" = None


LAYOUT = OnResume("layout")
MEANT = OnResume("meant")


class Section(BaseModel):
    """A part of the configuration tree. Unknown keys are refused; values are frozen after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)

    on_resume: ClassVar[OnResume | None] = None
    """The rule for fields that have no rule of their own; None: the enclosing section's rule."""

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse a bool where none belongs: YAML reads `on` and `yes` as true, which would count as 1.

        A field of type Literal is left out here, because its own error message lists the allowed words.
        """
        if get_origin(cls.model_fields[str(info.field_name)].annotation) is Literal:
            return value
        if has_bool(value) and not cls.takes_bool(str(info.field_name)):
            raise ValueError(
                "a yes or no (YAML reads on, off, yes and no as such) where none belongs; quote it if it is text"
            )
        return value

    @classmethod
    def takes_bool(cls, name: str) -> bool:
        """Whether the type of the field `name` allows a bool."""
        return bool in _types(cls.model_fields[name].annotation)

    @classmethod
    def section_type(cls, name: str) -> "type[Section] | None":
        """The section class in the field `name`; None if the field holds a value."""
        for kind in _types(cls.model_fields[name].annotation):
            if isinstance(kind, type) and issubclass(kind, Section):
                return kind
        return None

    @classmethod
    def along(cls, parts: Iterable[int | str]) -> Iterator[tuple[FieldInfo, "type[Section] | None"]]:
        """Yield each field on the way to a dotted name, with its section class; None: the field holds a value."""
        section: type[Section] | None = cls
        for part in map(str, parts):
            if section is None or part not in section.model_fields:
                return
            about, section = section.model_fields[part], section.section_type(part)
            yield about, section

    @classmethod
    def dotted_names(cls, prefix: str = "") -> Iterator[str]:
        """Yield dotted names for all fields and sections below this one, such as `parallel.tp`."""
        for name in cls.model_fields:
            yield f"{prefix}{name}"
            if (inner := cls.section_type(name)) is not None:
                yield from inner.dotted_names(f"{prefix}{name}.")

    @classmethod
    def is_in_bounds(cls, dotted: str, value: object) -> bool:
        """Whether a number is inside the bounds that the field `dotted` declares, such as `gt=0`."""
        *_, (about, _) = cls.along(dotted.split("."))
        if not isinstance(value, int | float):
            return True
        # pydantic keeps `gt=0` as an object with the attribute `gt`.
        limits = (
            (getattr(bound, word, None), keeps)
            for bound in about.metadata
            for word, keeps in (("gt", gt), ("ge", ge), ("lt", lt), ("le", le))
        )
        return all(limit is None or keeps(value, limit) for limit, keeps in limits)


@dataclass(frozen=True, slots=True)
class Subject:
    """A rule's input: the config, and the numbers of ranks in the run and on each node (None: not known)."""

    config: "Config"
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


_Section = TypeVar("_Section", bound=Section)


def value_of(section: Section | None, dotted: str) -> Any:
    """Return the value of a field, such as `train.steps`; None if its section is not given."""
    value: Any = section
    for name in dotted.split("."):
        value = None if value is None else getattr(value, name)
    return value


def with_value(section: _Section, dotted: str, value: object) -> _Section:
    """Copy the config, or a section, with one field changed, such as `train.steps` or `telemetry.profile.start`."""
    name, _, rest = dotted.partition(".")
    changed = with_value(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: changed})


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


def _types(annotation: Any) -> tuple[Any, ...]:
    """Return the annotation and, for a union, its members."""
    return annotation, *get_args(annotation)


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
