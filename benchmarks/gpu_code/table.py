"""GPU code of functions as a Markdown table, a row for each function."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.gpu_contenders.tables import markdown


@dataclass(frozen=True, slots=True)
class GpuCode:
    """The code of one function for one card, at one set of shapes.

    Attributes:
        name: of the function.
        key: as of `FusedCall.key`.
        elements: of its largest argument; of any length, of the example that was compiled.
        argument_bytes: of all its arguments.
        launches: kernels that a call launches, `operators` included.
        num_bytes: read and written by them: each tensor that a kernel is given, whole, once; a tensor that it changes, twice.
        operators: torch's own, called between the kernels.
        configurations: block sizes and warps of all kernels; inductor would measure those of a kernel and take the fastest.
        spilling: number of configurations that store registers in memory; of those inductor refuses the worse ones.
        registers: of a thread, the most of any configuration.
        spills: bytes that each kernel's best configuration stores and loads, of all kernels together.
    """

    name: str
    key: str
    elements: int
    argument_bytes: int
    launches: int
    num_bytes: int
    operators: int
    configurations: int
    spilling: int
    registers: int
    spills: int

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the numbers of `COLUMNS`."""
        counts = (self.launches, self.operators, self.registers, self.configurations, self.spilling)
        return (f"{self.num_bytes / self.elements:.2f}", *map(str, counts))


COLUMNS = ("bytes per element", "launches", "of them torch's", "registers", "configurations", "that spill")


def table(by_card: Mapping[str, Sequence[GpuCode]]) -> str:
    """Return the table: numbers that differ by shape as a range, those of the cards apart where they differ."""
    lines = []
    for name in dict.fromkeys(code.name for codes in by_card.values() for code in codes):
        of_cards = {card: own for card, codes in by_card.items() if (own := [one for one in codes if one.name == name])}
        alone = "" if len(of_cards) == len(by_card) else f", {' / '.join(of_cards)} alone"
        cells = [
            _by_card([code.cells[column] for code in codes] for codes in of_cards.values())
            for column in range(len(COLUMNS))
        ]
        lines.append((f"`{name}`{alone}", str(max(map(len, of_cards.values()))), *cells))
    return markdown((f"function, {' / '.join(by_card)}", "shapes", *COLUMNS), lines)


def _by_card(texts: Iterable[Sequence[str]]) -> str:
    ranges = []
    for of_card in texts:
        distinct = sorted(set(of_card), key=float)
        ranges.append(distinct[0] if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}")
    return " / ".join(ranges) if len(set(ranges)) > 1 else ranges[0]


SCALAR_BYTES = 8
"""Bytes of a number that a function need not read, as SGD's factors do not read the step's."""


def mistakes(by_card: Mapping[str, Sequence[GpuCode]]) -> list[str]:
    """List the functions that cannot do without spilled registers, and those whose counted bytes cannot be right."""
    found = []
    for card, codes in by_card.items():
        found += [f"{card}: {code.key} spills {code.spills} bytes at best" for code in codes if code.spills]
        found += [
            f"{card}: {code.key} moves {code.num_bytes} bytes, and its arguments have {code.argument_bytes}"
            for code in codes
            if code.num_bytes <= code.argument_bytes - SCALAR_BYTES
        ]
    return found
