"""A planted bug: where it can happen, and what a verdict has to say about it."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.parity.cases import Case


@dataclass(frozen=True)
class Bug:
    """A bug, where it can happen, and what the verdict has to say.

    Attributes:
        plant: called in each rank before anything is built.
        what: the kind of the first difference.
        names: parameters (or the first place) that must be named, and nothing else of that kind.
        axis: that must be given; None: none may be.
        text: part of the cause.
        dtype: of both runs.
        lives_on: axes without which the bug is none; None: `axis` alone.
    """

    plant: Callable[[], None]
    case: Case
    what: str
    names: Callable[[str], bool]
    axis: str | None
    text: str
    dtype: str = "float64"
    lives_on: frozenset[str] | None = None

    def __str__(self) -> str:
        return self.plant.__name__

    @property
    def axes(self) -> frozenset[str]:
        """The axes that may be named for it."""
        if self.lives_on is not None:
            return self.lives_on
        return frozenset() if self.axis is None else frozenset({self.axis})


def anything(name: str) -> bool:
    return True


def is_attention(layer: int) -> Callable[[str], bool]:
    return lambda name: name == f"layers.{layer}.attention"


def is_sample(name: str) -> bool:
    return "sample " in name
