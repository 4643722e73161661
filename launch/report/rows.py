"""Stores a long run's records compactly, with all their numbers in one array.

    record    {"step": 7, "loss": 2.5, "time_split": {"data_seconds": 0.1}, "note": "x"}

    numbers   .. | 7 2.5 0.1 | ..           8 bytes each, where a dict takes some 60
    others    .. | "x" | ..                 every value that is not stored as a number
    form      step: int 0; loss: float 1; time_split: {data_seconds: float 2}; note: other 0

The form has each value's kind, and its place among the record's numbers or others. Records with the same keys and kinds share a
form. 200,000 records with 45 numbers each take 90 MB instead of 1.1 GB.
"""

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

LARGEST_EXACT = 2**53
"""Largest integer up to which every integer is exact as a double."""

Form = dict[str, "tuple[str, int] | Form"]
"""Map from each key to the value's kind (`int`, `float` or `other`) and place; for a nested mapping, to that mapping's form."""


class Rows:
    """A store for the records in metrics.jsonl. A call adds one and returns its `Row`, which reads like the dict."""

    def __init__(self) -> None:
        self.numbers = array("d")
        self.others: list[Any] = []
        self._forms: dict[tuple[Any, ...], Form] = {}

    def __call__(self, record: Mapping[str, Any]) -> "Row":
        start = (len(self.numbers), len(self.others))
        shape = self._add(record)
        form = self._forms.get(shape)
        if form is None:
            form = self._forms[shape] = _form_of(shape, [0, 0])
        return Row(self, form, *start)

    def _add(self, record: Mapping[str, Any]) -> tuple[Any, ...]:
        """Append a record's values to `numbers` and `others`; return (key, kind, key, kind, ..).

        A value's kind is "int", "float" or "other". A nested mapping's kind is such a tuple.
        """
        shape: list[Any] = []
        for key, value in record.items():
            if type(value) is float or (type(value) is int and -LARGEST_EXACT <= value <= LARGEST_EXACT):
                self.numbers.append(value)
                shape += (key, type(value).__name__)
            elif isinstance(value, Mapping):
                shape += (key, self._add(value))
            else:
                self.others.append(value)
                shape += (key, "other")
        return tuple(shape)


def _form_of(shape: tuple[Any, ...], places: list[int]) -> Form:
    form: Form = {}
    for key, kind in zip(shape[::2], shape[1::2], strict=True):
        if isinstance(kind, tuple):
            form[key] = _form_of(kind, places)
        else:
            form[key] = (kind, places[kind == "other"])
            places[kind == "other"] += 1
    return form


class Row(Mapping[str, Any]):
    """A record in `Rows`, or a mapping inside a record. It reads like the original dict."""

    __slots__ = ("_form", "_number", "_other", "_store")

    def __init__(self, store: Rows, form: Form, number: int, other: int) -> None:
        self._store, self._form, self._number, self._other = store, form, number, other

    def __getitem__(self, key: str) -> Any:
        found = self._form[key]
        if isinstance(found, dict):
            return Row(self._store, found, self._number, self._other)
        kind, at = found
        if kind == "other":
            return self._store.others[self._other + at]
        value = self._store.numbers[self._number + at]
        return int(value) if kind == "int" else value

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self._form else default

    def __contains__(self, key: object) -> bool:
        return key in self._form

    def __iter__(self) -> Iterator[str]:
        return iter(self._form)

    def __len__(self) -> int:
        return len(self._form)
