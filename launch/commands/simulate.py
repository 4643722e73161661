"""`triaxis simulate`: time a step of a pipeline, action by action and message by message; no device.

config, or pp, vpp, microbatches   ->  the programs that would run   ->  bubble per rank, critical path, what is kept; a page
"""

import argparse
import math
import os
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console

from triaxis.engine.errors import ScheduleError, TriaxisError
from triaxis.engine.pipeline.actions import Schedule
from triaxis.engine.pipeline.lowering import Program, lower
from triaxis.engine.pipeline.simulate import Costs
from triaxis.engine.pipeline.simulate_program import Messages, ProgramTimeline, simulate_program
from triaxis.engine.pipeline.text import render_timeline
from triaxis.engine.telemetry.outlets.format import significant
from triaxis.launch.commands.schedule import add_sizes, asked_for, given_of, usual_dp
from triaxis.launch.simulate.measured import Measured, read_measured
from triaxis.launch.simulate.page import write_page
from triaxis.launch.simulate.words import path_lines, path_summary, rank_table
from triaxis.launch.start.command_line import CommandParser, above, check_counts, refuse

if TYPE_CHECKING:
    from triaxis.engine.config.tree import Config
    from triaxis.engine.layout.rank_grid import ParallelSizes
    from triaxis.launch.simulate.costs import DocumentDraws

EXAMPLES = """examples:
  triaxis simulate --pp 4 --microbatches 8 --name zb_h1 --transfer 0.1
  triaxis simulate configs/gpt_tiny.yaml --out page.html
  triaxis simulate configs/llama3_70b.yaml --gpus 64 --cluster 64xH100
  triaxis simulate configs/gpt_tiny.yaml --documents 100 data.attention=within data.synthetic=true data.synthetic_document_length=64
  triaxis simulate --measured runs/gpt_tiny --out page.html

With a config, a time is a number of forwards of a mean layer (FLOPs), or with --cluster in seconds. Of sizes alone, it is forwards
of a chunk where --forward is 1.
A run that was traced (telemetry.timeline) is simulated with the mean seconds of its own actions.
"""
MOST_COLUMNS = 6000
"""Of the picture in the terminal: a longer one is left to the page."""
MOST_DRAWS = 10_000


def add_arguments(parser: CommandParser) -> None:
    words = "(CONFIG [--gpus N] [section.key=value ...] | --pp P [--vpp V] --microbatches M) [options]"
    parser.usage, parser.epilog = f"triaxis simulate {words}", EXAMPLES
    add_sizes(parser)
    for name, meaning in (
        ("forward", "seconds, or any unit, of a forward of a stage (default: 1)"),
        ("input-grad", "the same of an input gradient (default: 1)"),
        ("weight-grad", "the same of a weight gradient (default: 1)"),
    ):
        parser.add_argument(f"--{name}", type=float, metavar="T", help=f"without a config: {meaning}")
    parser.add_argument(
        "--cluster",
        metavar="FILE|NxGPU",
        help="with a config: seconds on this cluster, such as 64xH100 (default: FLOPs)",
    )
    parser.add_argument(
        "--transfer", type=float, metavar="T", help="of a message (default: 0; with --cluster, the cluster's)"
    )
    parser.add_argument(
        "--latency",
        type=float,
        metavar="T",
        default=0.0,
        help="part of a transfer in which its channel is free (default: 0)",
    )
    parser.add_argument(
        "--post", type=float, metavar="T", default=0.0, help="what a group call takes of its rank (default: 0)"
    )
    parser.add_argument(
        "--backend",
        choices=("nccl", "gloo"),
        default="nccl",
        help="nccl (default): calls of a group wait for each other",
    )
    parser.add_argument(
        "--receives",
        choices=("early", "late"),
        default="early",
        help="late: the first step after a start (default: early)",
    )
    parser.add_argument(
        "--documents",
        type=int,
        metavar="N",
        help="draw the documents of N steps: how unequal microbatches spread the span",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of --documents (default: 1)")
    parser.add_argument(
        "--measured", type=Path, metavar="RUN_DIR", help="compare with a traced run; its config is the default"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write an HTML page with every action")


def run(args: argparse.Namespace) -> int:
    """Simulate and print; 0. ScheduleError, ConfigError or TriaxisError for what cannot be timed."""
    console = Console(highlight=False, soft_wrap=True)
    if args.measured is not None and args.config is None and args.pp is None:
        args.config = _config_of(args.measured)
    measured = draws = None
    if args.config is None:
        if useless := given_of(args, "documents", "measured", "cluster"):
            raise ScheduleError(
                f"{', '.join(useless)} without a config: documents, runs and costs on a cluster have one. Name it."
            )
        schedule = asked_for(args)
        costs = _typed_costs(args, schedule)
        unit = "forwards of a stage" if args.forward is None else "as in --forward"
    else:
        config, sizes, schedule = _of_config(args)
        if args.measured is not None:
            measured = read_measured(args.measured, schedule)
        costs, unit = _config_costs(args, config, sizes, schedule, measured)
        draws = None if args.documents is None else _draws(args, config, sizes, costs)
        if draws is not None:
            costs = draws.mean
        elif config.data.attention == "within" and measured is None:
            unit += ", as if tokens attended across documents (--documents N draws them)"
    program = lower(schedule, args.receives)
    messages = Messages(args.latency, args.post, args.backend)
    timeline = simulate_program(program, costs, messages)
    if timeline.span <= 0:
        raise ScheduleError("every action takes no time: nothing has a share of nothing. Give costs above 0.")
    if args.out is not None:  # before any line, since a reader such as `head` may end the program
        placement = schedule.placement
        named = args.measured or args.config
        what = "a pipeline" if named is None else named.name
        title = f"Simulated step of {what}: {schedule.name}, pp {placement.pp}, vpp {placement.vpp}"
        write_page(timeline, args.out, title, unit, measured)
    _print(console, timeline, unit, measured)
    if draws is not None:
        _print_draws(console, draws, args.documents, program, messages)
    if args.out is not None:
        console.print(f"wrote {args.out}")
    return 0


def _config_of(run_directory: Path) -> Path:
    path = run_directory / "config.yaml"
    if not path.is_file():
        raise TriaxisError(
            f"{run_directory} holds no config.yaml, so the run's schedule is unknown. Give a run directory, or name the config."
        )
    return path


def _typed_costs(args: argparse.Namespace, schedule: Schedule) -> Costs:
    typed = (args.forward, args.input_grad, args.weight_grad)
    forward, input_grad, weight_grad = (1.0 if each is None else each for each in typed)
    return Costs.uniform(schedule.placement.num_stages, forward, input_grad, weight_grad, args.transfer or 0.0)


def _of_config(args: argparse.Namespace) -> "tuple[Config, ParallelSizes, Schedule]":
    """Read the config, its sizes and the schedule of its training step."""
    from dataclasses import replace

    from triaxis.engine.config.load import load_config
    from triaxis.engine.config.plan import data_parallel_size, parallel_sizes
    from triaxis.models.trained_part import schedule_of_step

    if given := given_of(args, "pp", "vpp", "microbatches", "name", "forward", "input_grad", "weight_grad"):
        raise ScheduleError(
            f"{args.config} together with {', '.join(given)}: the configuration says these, and two answers would leave open what "
            "was timed. Give one of them; a size of the configuration is changed with an override, such as parallel.pp=4."
        )
    check_counts(dp=args.dp, world_size=args.world_size, documents=args.documents)
    if args.documents is not None and args.measured is not None:
        raise ScheduleError(
            "--documents together with --measured: the run has its own documents in its times. Give one of them."
        )
    if args.documents is not None:
        refuse(above("documents", args.documents, MOST_DRAWS, "each of them is a simulation"))
    if args.dp is not None and args.world_size is not None:
        raise ScheduleError("--dp together with --world-size: each says how many replicas there are. Give one of them.")
    config = load_config(args.config, args.overrides, os.environ, world_size=args.world_size)
    parallel = config.parallel
    dp = args.dp or data_parallel_size(parallel, args.world_size) or usual_dp(config)
    sizes = parallel_sizes(config.model_copy(update={"parallel": parallel.model_copy(update={"dp": dp})}))
    return config, replace(sizes, dp=dp), schedule_of_step(config, sizes)


def _config_costs(
    args: argparse.Namespace, config: "Config", sizes: "ParallelSizes", schedule: Schedule, measured: Measured | None
) -> tuple[Costs, str]:
    """Return costs of the stages and their unit: measured seconds, or FLOPs."""
    from dataclasses import replace

    from triaxis.launch.simulate.costs import UNIT, flops_costs
    from triaxis.models.predict.step_time.cluster import cluster_at
    from triaxis.models.predict.step_time.estimate import Estimator

    if measured is not None:
        costs, unit = measured.costs(schedule), "seconds"
    elif args.cluster is not None:
        costs, unit = Estimator(cluster_at(args.cluster)).costs(config, sizes), f"seconds on {args.cluster}"
    else:
        costs, unit = flops_costs(config, sizes), UNIT
    return costs if args.transfer is None else replace(costs, transfer=args.transfer), unit


def _print(console: Console, timeline: ProgramTimeline, unit: str, measured: Measured | None) -> None:
    schedule, placement = timeline.schedule, timeline.schedule.placement
    console.print(
        f"{schedule.name}, pp {placement.pp}, vpp {placement.vpp}, {schedule.num_microbatches} microbatches, "
        f"{timeline.program.receives} receives; unit of time: {unit}"
    )
    console.print(
        f"span {significant(timeline.span)}, bubble {timeline.largest_bubble_fraction:.2%} of it on the rank that waits most"
    )
    if measured is not None:
        off = timeline.span / measured.span - 1
        console.print(f"measured in step {measured.step}: span {significant(measured.span)}; simulated {off:+.1%}")
    bubbles = None if measured is None else [measured.bubble_fraction(rank) for rank in range(placement.pp)]
    console.print(rank_table(timeline, bubbles))
    console.print(f"critical path: {path_summary(timeline)}")
    for line in path_lines(timeline):
        console.print(f"  {line}", markup=False)
    shortest = min(each.end - each.start for row in timeline.intervals for each in row if each.end > each.start)
    if timeline.span / shortest * 4 > MOST_COLUMNS:
        console.print("The picture is too long for a terminal: --out page.html draws it.")
    else:
        console.print(render_timeline(timeline, console.width if console.is_terminal else None))


def _draws(args: argparse.Namespace, config: "Config", sizes: "ParallelSizes", costs: Costs) -> "DocumentDraws":
    """Look at the documents of the run, whose corpus must be there."""
    from triaxis.engine.data.datasets import open_datasets
    from triaxis.launch.simulate.costs import DocumentDraws, document_statistics

    if config.data.attention == "across":
        raise ScheduleError(
            "--documents with data.attention=across: tokens attend across documents, so all microbatches cost the same, with "
            "nothing to draw. Leave it out, or set data.attention=within."
        )
    model = config.model
    datasets = open_datasets(config.data, model.seq_length, config.train.seed, vocab_size=model.vocab_size)
    return DocumentDraws(config, sizes, document_statistics(config, sizes, datasets.train), costs, args.seed)


def _print_draws(
    console: Console, draws: "DocumentDraws", num_steps: int, program: Program, messages: Messages
) -> None:
    """Print how documents spread the span of one pipeline."""
    steps = draws.draw(num_steps, program.schedule.num_microbatches)
    timelines = [simulate_program(program, step, messages) for step in steps]
    spans = sorted(each.span for each in timelines)
    bubbles = sorted(each.largest_bubble_fraction for each in timelines)
    high = math.ceil(0.95 * num_steps) - 1
    console.print(
        f"above: microbatches with the mean of all documents, {draws.documents.per_sample:.3g} a sample. "
        f"Of {num_steps} drawn steps (seed {draws.seed}): span median {significant(median(spans))}, 95 % at most "
        f"{significant(spans[high])}, largest {significant(spans[-1])}; bubble median {median(bubbles):.2%}, "
        f"95 % at most {bubbles[high]:.2%}"
    )
