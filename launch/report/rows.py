"""Stores a long run's records compactly, with a record's numbers in one array.

    record    {"step": 7, "loss": 2.5, "time_split": {"data_seconds": 0.1}, "note": "x"}

    numbers   7 2.5                         8 bytes each, where a dict takes some 60
    others    {"data_seconds": 0.1}, "x"    every other value; a nested mapping is a row of its own
    form      step: int 0; loss: float 1; time_split: other 0; note: other 1

The form has each value's type, and its place among the record's numbers or others. Records with the same keys and types share a
form. 200,000 records with 45 numbers each take 140 MB instead of 1.1 GB.
"""

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

LARGEST_EXACT = 2**53
"""Largest integer up to which every integer is exact as a double."""

Form = dict[str, tuple[type[int] | type[float] | None, int]]
"""Map from each key to the value's type and its place among the numbers; to None and its place among the others."""


class Rows:
    """A maker of rows from the records in metrics.jsonl, which share their forms."""

    def __init__(self) -> None:
        self._forms: dict[tuple[Any, ...], Form] = {}

    def __call__(self, record: Mapping[str, Any]) -> "Row":
        form: Form = {}
        numbers: list[float] = []
        others: list[Any] = []
        for key, value in record.items():
            if type(value) is float or (type(value) is int and -LARGEST_EXACT <= value <= LARGEST_EXACT):
                form[key] = type(value), len(numbers)
                numbers.append(value)
            else:
                form[key] = None, len(others)
                others.append(self(value) if isinstance(value, Mapping) else value)
        return Row(self._forms.setdefault(tuple(form.items()), form), array("d", numbers), tuple(others))


class Row(Mapping[str, Any]):
    """A record, or a mapping inside a record. It reads like the original dict."""

    __slots__ = ("_form", "_numbers", "_others")

    def __init__(self, form: Form, numbers: "array[float]", others: tuple[Any, ...]) -> None:
        self._form, self._numbers, self._others = form, numbers, others

    def __getitem__(self, key: str) -> Any:
        kind, at = self._form[key]
        return self._others[at] if kind is None else kind(self._numbers[at])

    def get(self, key: str, default: Any = None) -> Any:
        # The one that is inherited catches an error for each missing key, which takes long.
        return self[key] if key in self._form else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._form)

    def __len__(self) -> int:
        return len(self._form)
