"""Describe a race: both operators' program lines, the memory rule they break, and the remedy."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Literal

import torch

from triaxis.engine.comm import collectives
from triaxis.engine.program import ROOT
from triaxis.launch.footprint.races.clocks import Operator

RaceKind = Literal["unordered read", "unordered overwrite", "unordered writes", "early free"]

_SHARED = "Two streams may use the same memory only if an event and a wait, or the host, order them."
_FREED = "Memory may be freed only after the stream that allocated it has waited for every other stream that uses it."

EXPLAINED: dict[RaceKind, tuple[str, str, str]] = {
    "unordered read": (
        "writes, then reads",
        f"{_SHARED} On a GPU the second could read values from before the first, and no error would say so.",
        "Wait for the first before the second is posted.",
    ),
    "unordered overwrite": (
        "reads, then writes",
        f"{_SHARED} On a GPU the first could read values of the second, and no error would say so.",
        "Wait for the first before the second is posted, or write somewhere else.",
    ),
    "unordered writes": (
        "writes, then writes",
        f"{_SHARED} On a GPU the values of either could be left in the end, and no error would say so.",
        "Wait for the first before the second is posted.",
    ),
    "early free": (
        "uses, then frees",
        f"{_FREED} The allocator gives it to the next tensor of that stream, and both would use it.",
        "Keep a reference until that stream has waited for the first.",
    ),
}
"""For each kind: what the two operators do, the rule with what would break, and the remedy."""


@dataclass(frozen=True, slots=True)
class Race:
    """Two operators that must be ordered and are not.

    Attributes:
        kind: what the two operators do with the memory; a key of `EXPLAINED`.
        first, second: operators in the order in which they were posted. For an early free, the second operator is `free`, at the
            line where the last reference was dropped.
        tensor: shape, dtype and name of the tensor that the second operator uses.
        times: number of races between these two program lines.
    """

    kind: RaceKind
    first: Operator
    second: Operator
    tensor: str
    times: int = 1

    def __str__(self) -> str:
        verbs, rule, remedy = EXPLAINED[self.kind]
        first, second = verbs.split(", then ")
        times = f", {self.times:,} times" if self.times > 1 else ""
        return (
            f"{self.kind} of {self.tensor}{times}\n"
            f"  the first {first}: {self.first}\n"
            f"  the second {second}: {self.second}\n"
            f"  Nothing orders the second after the first. {rule} {remedy}"
        )


class Origins:
    """Finds the program line that posts an operator.

    This line is the innermost line of this project on the call stack, outside this package and `collectives`.
    """

    def __init__(self) -> None:
        outside = (Path(torch.__file__).parent, Path(__file__).parent, collectives.__file__)
        self._outside = tuple(map(str, outside))
        self._names: dict[CodeType, str] = {}

    def of_caller(self) -> str:
        """Find the project line that posts the present operator, and return it as `file:line`.

        The path is relative to the project. If there is no such line, return "an unknown place".
        """
        frame = sys._getframe(1)
        while True:
            name = self._names.get(frame.f_code)
            if name is None:
                name = self._names[frame.f_code] = self._name(frame.f_code.co_filename)
            if name:
                return f"{name}:{frame.f_lineno}"
            if frame.f_back is None:
                return "an unknown place"
            frame = frame.f_back

    def _name(self, file: str) -> str:
        if file.startswith(self._outside) or not file.startswith(str(ROOT)):
            return ""
        return str(Path(file).relative_to(ROOT)).removeprefix("triaxis/")
