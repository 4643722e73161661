"""A process that pretends to have one card, and compiles every function for it.

python -m benchmarks.gpu_code.worker CARD RESULT        RESULT: JSON, [key, part, elements, code] of each function
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu_code.cards import CARDS, Card
from benchmarks.gpu_code.cases import cases
from benchmarks.gpu_code.compiler import Compiler
from benchmarks.gpu_code.step import FusedCall, record_step


def calls_of_cases(card: Card) -> dict[str, FusedCall]:
    """Return a call of every key that a card runs, of any length the longest."""
    found: dict[str, FusedCall] = {}
    for case in (each for each in cases() if card.has_fp8 or each.config.precision.fp8 is None):
        for call in record_step(case.config).calls:
            if call.key not in found or call.elements > found[call.key].elements:
                found[call.key] = call
    return found


def main(card: str, result: Path) -> None:
    calls = calls_of_cases(CARDS[card])
    compiler = Compiler(CARDS[card])
    rows = []
    for number, (key, call) in enumerate(calls.items(), start=1):
        print(f"{card}: {number} of {len(calls)}, {call.name}", file=sys.stderr)
        rows.append([key, call.part, call.elements, asdict(compiler.compile(call))])
    result.write_text(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
