"""The committed numbers as a Markdown table, a row for each function."""

import re
from collections.abc import Callable, Iterable, Sequence

from benchmarks.gpu_code.golden import Function, Golden, GpuCode


def table(golden: Golden) -> str:
    """Return the table: numbers that differ by shape as a range, those of the cards apart where they differ."""
    cards = list(next(iter(golden.functions.values())).code)
    by_name: dict[str, list[Function]] = {}
    for one in golden.functions.values():
        by_name.setdefault(function_name(one.key), []).append(one)
    columns = ("bytes per element", "launches", "of them torch's", "registers", "configurations", "that spill")
    lines = [f"| function, {' / '.join(cards)} | shapes | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for name, ones in by_name.items():
        run_by = list(ones[0].code)
        alone = "" if run_by == cards else f", {' / '.join(run_by)} alone"
        lines.append(
            f"| `{name}`{alone} | {len(ones)} | "
            + " | ".join(
                (
                    _by_card([[f"{one.bytes_per_element(card):.2f}" for one in ones] for card in run_by]),
                    _codes(ones, run_by, lambda code: str(code.launches)),
                    _codes(ones, run_by, lambda code: str(len(code.operators))),
                    _codes(ones, run_by, lambda code: str(code.registers)),
                    _codes(ones, run_by, lambda code: str(code.configurations)),
                    _codes(ones, run_by, lambda code: str(code.spilling)),
                )
            )
            + " |"
        )
    return "\n".join(lines)


def function_name(key: str) -> str:
    """Return the function's name without its module, of `triaxis.engine.kernels.elementwise._rope(...)`: `_rope`."""
    found = re.match(r"[\w.]*\.(\w+)\(", key)
    assert found is not None, key
    return found[1]


def _codes(ones: Sequence[Function], cards: Sequence[str], text: Callable[[GpuCode], str]) -> str:
    return _by_card([[text(one.code[card]) for one in ones] for card in cards])


def _by_card(texts: Iterable[Sequence[str]]) -> str:
    ranges = []
    for of_card in texts:
        distinct = sorted(set(of_card), key=float)
        ranges.append(distinct[0] if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}")
    return " / ".join(ranges) if len(set(ranges)) > 1 else ranges[0]
