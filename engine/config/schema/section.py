"""The base class for sections: fields with types, bounds and descriptions, and verdicts on a resume.

A section is one class in one file. A field or its section also states whether a resumed run may change it (`OnResume`). Rules that
relate fields to each other are apart (`engine/config/rules/problem.py`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import ge, gt, le, lt
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from triaxis.engine.config.values.counts import has_bool

LARGEST_WIDTH = 2**24
"""Maximum width in elements: of the residual stream, the MLP, an expert, a head or a latent."""

LONGEST_SEQUENCE = 2**30
"""Maximum number of tokens in a sample, a window or a context."""

Verdict = Literal["layout", "meant", "never"]


@dataclass(frozen=True, slots=True)
class OnResume:
    """The rule for a field that differs between a saved run and the run that resumes it.

        layout    the field affects speed only: a difference is always allowed, and printed
        meant     the run becomes another one, which may be intended: allowed if `checkpoint.accept` names the field
        never     the weights or the position in the data would mean something else: always refused

    Attributes:
        verdict: one of these three words.
        is_layout: test on the new `Config`; if it returns True, the verdict is `layout` instead. None: no test.
    """

    verdict: Verdict
    is_layout: Callable[[Any], bool] | None = None


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


def _types(annotation: Any) -> tuple[Any, ...]:
    """Return the annotation and, for a union, its members."""
    return annotation, *get_args(annotation)
