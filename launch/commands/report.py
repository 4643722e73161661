"""`triaxis report` writes a run directory as one HTML page, or its timelines as one file for Perfetto.

runs/<name>/timeline/attempt_00/rank_*.json   ->   runs/<name>/timeline.json
"""

import argparse
import time
from pathlib import Path

from triaxis.engine.errors import TriaxisError
from triaxis.engine.storage.files import write_atomically
from triaxis.engine.telemetry.timing.timeline import merge
from triaxis.launch.report.page import render
from triaxis.launch.report.record import read_run
from triaxis.launch.start.command_line import add_json, add_open, add_output, open_page, print_json, refuse, typed
from triaxis.models.predict.step_time.cluster import cluster_at

EXAMPLES = """examples:
  triaxis report runs/gpt_tiny
  triaxis report runs/gpt_tiny --output gpt_tiny.html --open
  triaxis report runs/llama3_8b --cluster configs/clusters/h100_64.yaml
  triaxis report runs/gpt_tiny --timeline

The page needs no network and no other file, and may be made while the run runs. docs/telemetry.md describes it. The timeline is
that of the newest attempt that was traced (telemetry.timeline), also of a run that broke.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "triaxis report RUN_DIR [--cluster FILE|NxGPU] [--output FILE] [--open] | --timeline"
    parser.epilog = EXAMPLES
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a run directory, such as runs/gpt_tiny")
    parser.add_argument(
        "--cluster",
        metavar="FILE|NxGPU",
        help="where the run ran, for predicted seconds beside the measured (default: the GPUs that it recorded)",
    )
    parser.add_argument(
        "--timeline", action="store_true", help="instead: put the timelines of all ranks together, for Perfetto"
    )
    add_output(parser, "where the page goes (default: RUN_DIR/report.html)")
    add_open(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the page as a whole or not at all. With --timeline, write the timeline and print its path.

    Raises:
        TriaxisError: the run or the cluster does not exist, the page cannot be written, or (--timeline) no rank wrote a timeline.
    """
    if args.timeline:
        useless = typed(args, "cluster", "output", "open")
        refuse(
            f"{word} with --timeline: no page is made, so {word} would do nothing. Leave one out." for word in useless
        )
        merged = merge(args.run)
        print(merged)
        print_json(args, {"timeline": str(merged)})
        return 0
    cluster = None if args.cluster is None else cluster_at(args.cluster)
    page = render(read_run(args.run), time.time(), cluster)
    out = args.output or args.run / "report.html"
    try:
        write_atomically(out, [page.encode()])
    except OSError as error:
        raise TriaxisError(
            f"the page cannot be written to {out}: {error.strerror or error}. Give another place with --output FILE."
        ) from None
    print(f"{out}: {len(page.encode()) / 1e3:,.0f} kB; open it in a browser")
    open_page(args, out)
    print_json(args, {"page": str(out)})
    return 0
