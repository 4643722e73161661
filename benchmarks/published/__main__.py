"""Predict the runs of a table, and compare with what was published.

    python -m benchmarks.published                   the shipped table, benchmarks/published/runs.csv
    python -m benchmarks.published mine.csv          another one with these columns
    python -m benchmarks.published --standing 64     also search for the layouts published on at most 64 GPUs
    python -m benchmarks.published --losses          also predict this engine in these layouts, and to what it loses time

The rates are those of the shipped devices, so nothing else can be chosen.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.published import losses, standing
from benchmarks.published.compare import compare, lines

RUNS = Path(__file__).parent / "runs.csv"


def main(argv: Sequence[str] | None = None) -> None:
    """Print predicted and published seconds of each row, their order, and where the planner places the published layouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, nargs="?", default=RUNS)
    parser.add_argument("--standing", type=int, metavar="N", help="GPUs of the largest cluster that is searched")
    parser.add_argument(
        "--losses", action="store_true", help="to what this engine loses a step's time in these layouts"
    )
    args = parser.parse_args(argv)
    found = compare(args.table)
    print("\n".join(lines(found)))
    if args.standing is not None:
        print("\n".join(standing.lines(list(standing.standings(found.rows, args.standing)))))
    if args.losses:
        print("\n".join(losses.lines(list(losses.losses(found.rows)))))


if __name__ == "__main__":
    main()
