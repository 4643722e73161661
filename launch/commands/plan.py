"""`triaxis plan` finds a config's fastest layouts on a cluster, by predicted step time and memory."""

import argparse
import math
import os
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from triaxis.engine.config.load import load_config
from triaxis.engine.config.values.counts import count
from triaxis.engine.config.write import to_yaml
from triaxis.engine.program import triaxis
from triaxis.launch.footprint.own_costs import OwnCostsMeter
from triaxis.launch.planning.page import render
from triaxis.launch.planning.search import SIMULATED, Found, search
from triaxis.launch.planning.text import as_json, plan_console, show
from triaxis.launch.start.command_line import (
    CONFIG,
    CommandParser,
    add_json,
    check_counts,
    open_page,
    print_json,
    refuse,
    write_output,
)
from triaxis.models.predict.rank_memory import GB
from triaxis.models.predict.step_time.cluster import Cluster, cluster_at

EXAMPLES = """examples:
  triaxis plan configs/llama3_8b.yaml --gpus 64xH100
  triaxis plan configs/llama3_8b.yaml --cluster configs/clusters/h100_64.yaml --tokens 15T --output plan.yaml
  triaxis plan configs/llama3_70b.yaml --gpus 64xH100 --output plan.html --open

All layouts that keep the rules are timed by a formula, the memory of the fastest is predicted, and the schedules of those that
fit are simulated. The config's global batch stays; its layout, micro batch, schedule and recomputation are chosen. So is
parallel.zero, unless you give it: the lowest stage that fits, or a higher one where that saves recomputation.
"""
DEFAULT_TOP = 10
DEFAULT_MARGIN = 5.0
"""GB per device that no layout may fill: room for operators' workspace and for the prediction error."""

SECONDS_PER_HOUR = 3600
PAGE = ".html"


def add_arguments(parser: CommandParser) -> None:
    parser.usage = "triaxis plan CONFIG (--gpus NxGPU | --cluster FILE) [section.key=value ...] [options]"
    parser.epilog = EXAMPLES
    parser.takes(CONFIG, "model and batch of the run")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpus", metavar="NxGPU", help="devices with their usual links, such as 64xH100")
    where.add_argument("--cluster", metavar="FILE", help="a cluster's file, such as configs/clusters/h100_64.yaml")
    parser.add_argument(
        "--margin",
        type=float,
        default=DEFAULT_MARGIN,
        metavar="GB",
        help=f"memory of a GPU, in 10^9 bytes, that stays free besides a tenth of it (default: {DEFAULT_MARGIN:g})",
    )
    parser.add_argument("--tokens", metavar="N", help="budget, such as 15T: its hours and cost are printed")
    parser.add_argument(
        "--expert-load",
        type=float,
        metavar="X",
        help="rows of the rank with most over the mean, for time and memory with dispatch by all_to_all (default: 1)",
    )
    parser.add_argument(
        "--top", type=int, default=DEFAULT_TOP, metavar="N", help=f"layouts to list (default: {DEFAULT_TOP})"
    )
    parser.add_argument(
        "--output",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help=".yaml: the config of the fastest layout; .html: a page with Pareto plot, memory, schedule, rank map. May be repeated",
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Search, print the layouts, and write the chosen config. Raises ConfigError if no layout is legal or fits."""
    check_counts(top=args.top)
    _check_endings(args)
    if not 0 <= args.margin < math.inf:
        refuse([f"--margin {args.margin:g}: it is a number of GB from 0 on, or no layout would be looked for."])
    if args.gpus is None and args.cluster is None:
        refuse(["plan needs a cluster: give --gpus, such as --gpus 64xH100, or --cluster and its file."])
    tokens = None if args.tokens is None else _tokens(args.tokens)
    cluster = cluster_at(args.gpus or args.cluster)
    config = load_config(args.config, args.overrides, os.environ)
    load = 1.0 if args.expert_load is None else args.expert_load
    if load < 1 or (args.expert_load is not None and not config.model.has_experts):
        refuse([f"--expert-load = {load:g}: it is at least 1, of the experts of a model that has some."])
    print(f"looking for the fastest layouts of {cluster.num_gpus:,} GPUs ...", file=sys.stderr, flush=True)
    console = Console(stderr=True)
    columns = TextColumn("layouts found and simulated"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=2 * SIMULATED)
        plan = search(
            config,
            cluster,
            expert_load=load,
            margin_bytes=round(args.margin * GB),
            measure=OwnCostsMeter(),
            keeps_zero=any(each.partition("=")[0] == "parallel.zero" for each in args.overrides),
            advance=lambda: bar.advance(task),
        )
    console = plan_console()
    show(console, plan, str(args.config), args.top)
    budget = "" if tokens is None else _budget(plan.best, cluster, tokens)
    if budget:
        console.print(budget)
    for path in args.output:
        if path.suffix == PAGE:
            write_output(path, render(plan, str(args.config), budget))
            print(f"wrote {path}; open it in a browser")
            open_page(args, path)
        else:
            write_output(path, to_yaml(plan.best.config, describe=True))
            print(f"wrote {path}; train with  " + triaxis(f"train {shlex.quote(str(path))}"))
    print_json(args, as_json(plan, args.top))
    return 0


def _tokens(text: str) -> int:
    try:
        number = count(text)
    except ValueError as error:
        refuse([f"--tokens {text}: {error}."])
    assert isinstance(number, int)
    return number


def _budget(best: Found, cluster: Cluster, tokens: int) -> str:
    hours = tokens / best.tokens_per_second / SECONDS_PER_HOUR
    gpu_hours = hours * cluster.num_gpus
    return (
        f"{tokens:,} tokens: {hours / 24:,.1f} days, {gpu_hours:,.0f} GPU-hours, {gpu_hours * cluster.price_per_gpu_hour:,.0f} at "
        f"{cluster.price_per_gpu_hour:g} per GPU-hour"
    )


def _check_endings(args: argparse.Namespace) -> None:
    """Refuse, before the search, file names whose ending does not match their content."""
    problems = [
        f"--output {path}: a config ends in .yaml and a page in {PAGE}, or programs would misread it. Rename it."
        for path in args.output
        if path.suffix not in (".yaml", PAGE)
    ]
    if args.open and not any(path.suffix == PAGE for path in args.output):
        problems.append(f"--open without a page: add --output plan{PAGE}.")
    refuse(problems)
