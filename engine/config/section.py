"""The base of every part of the configuration (no torch here)."""

from collections.abc import Iterator
from operator import ge, gt, le, lt
from typing import get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A part of the tree: unknown keys are refused, values cannot be changed after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """YAML reads `on` and `yes` as true, which would otherwise count as 1."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError(
                "a yes or no (YAML reads on, off, yes and no as such) where none belongs; quote it if it is text"
            )
        return value

    @classmethod
    def section_type(cls, name: str) -> "type[Section] | None":
        """The section that the field `name` holds, or None if it holds a value."""
        annotation = cls.model_fields[name].annotation
        for kind in (annotation, *get_args(annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                return kind
        return None

    @classmethod
    def dotted_names(cls, prefix: str = "") -> Iterator[str]:
        """Every field of this section and of the sections in it, such as `parallel.tp`; sections have a name too."""
        for name in cls.model_fields:
            yield f"{prefix}{name}"
            if (inner := cls.section_type(name)) is not None:
                yield from inner.dotted_names(f"{prefix}{name}.")

    @classmethod
    def is_in_bounds(cls, dotted: str, value: object) -> bool:
        """Return False where a number is outside the bounds that the field `dotted` declares, such as `gt=0`."""
        name, _, rest = dotted.partition(".")
        inner = cls.section_type(name)
        if rest and inner is not None:
            return inner.is_in_bounds(rest, value)
        if not isinstance(value, int | float):
            return True
        # pydantic keeps `gt=0` as an object with the attribute `gt`, and likewise for the others.
        limits = (
            (getattr(bound, word, None), keeps)
            for bound in cls.model_fields[name].metadata
            for word, keeps in (("gt", gt), ("ge", ge), ("lt", lt), ("le", le))
        )
        return all(limit is None or keeps(value, limit) for limit, keeps in limits)
