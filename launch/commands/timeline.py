"""`triaxis timeline`: one file for Perfetto out of what every rank wrote about the same steps; of a broken or running run too.

runs/<name>/timeline/attempt_00/rank_*.json   ->   runs/<name>/timeline.json
"""

import argparse
from pathlib import Path

from triaxis.engine.telemetry.timing.timeline import merge

EXAMPLES = """examples:
  triaxis timeline runs/gpt_tiny
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "triaxis timeline RUN_DIR"
    parser.epilog = EXAMPLES
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="run directory, runs/<name>")


def run(args: argparse.Namespace) -> int:
    """Write the file and name it; TriaxisError where no rank wrote anything."""
    print(merge(args.run))
    return 0
