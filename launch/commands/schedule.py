"""`triaxis schedule` prints, proves or times a pipeline schedule, without a device or torch.

print    config, or pp, vpp and microbatches  ->  each rank's actions, lowered program, or timeline as text or picture
check    the same                             ->  complete, in order, free of deadlock under rules stricter than NCCL's
times    the same, and costs                  ->  bubble and waits of each rank, what it keeps, the critical path
"""

import argparse
import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from triaxis.engine.errors import ScheduleError, shown
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Schedule
from triaxis.engine.pipeline.forwards import forward_only
from triaxis.engine.pipeline.lowering import lower
from triaxis.engine.pipeline.programs import Programs, schedule_file_runs
from triaxis.engine.pipeline.simulate import Costs, simulate
from triaxis.engine.pipeline.text import program_to_text, render_timeline, to_text
from triaxis.engine.telemetry.outlets.format import significant
from triaxis.launch.pictures.schedule_picture import draw_schedule, in_forwards
from triaxis.launch.pictures.schedule_times import critical_path, path_lines, path_summary, rank_table, rank_waits
from triaxis.launch.pictures.tables import terminal_table
from triaxis.launch.start.command_line import (
    CONFIG,
    CommandParser,
    add_open,
    add_output,
    add_world_size,
    check_counts,
    open_page,
    print_json,
    refuse,
    typed,
    write_output,
)

if TYPE_CHECKING:
    from triaxis.engine.config.tree import Config

PRINT_EXAMPLES = """examples:
  triaxis schedule print configs/gpt_tiny.yaml --form timeline
  triaxis schedule print --pp 4 --microbatches 8
  triaxis schedule print --pp 4 --vpp 2 --microbatches 8 --form timeline
  triaxis schedule print --pp 4 --vpp 2 --microbatches 8 --form svg --output schedule.svg
"""
CHECK_EXAMPLES = """examples:
  triaxis schedule check --pp 4 --vpp 2 --microbatches 8
  triaxis schedule check configs/gpt_tiny.yaml
  triaxis schedule check configs/gpt_175b.yaml --gpus 1024 parallel.vpp=6
"""
TIMES_EXAMPLES = """examples:
  triaxis schedule times configs/gpt_tiny.yaml
  triaxis schedule times --pp 4 --microbatches 8 --name zb_h1 --transfer 0.1
  triaxis schedule times configs/llama3_70b.yaml --gpus 64 --cluster 64xH100

A time is a number of forwards: of a mean layer (by FLOPs) with a config, of a stage without one. With --cluster it is in seconds.
"""
MOST_PASSES = 2**21
"""Maximum number of forward passes (stages x microbatches) for sizes on the command line; the largest published runs have half a
million.
"""

USUAL_ROUNDS = 4
"""Microbatches per pipeline rank if neither the config nor `--gpus` gives dp: enough to fill the pipeline, and quick to check."""


def add_arguments(parser: CommandParser) -> None:
    words = "(CONFIG [--gpus N] | --pp P [--vpp V] --microbatches M) [--form FORM] [--output FILE]"
    show = parser.add_verb("print", "print or draw a pipeline schedule, of a config or of sizes", words, PRINT_EXAMPLES)
    add_sizes(show)
    show.add_argument(
        "--form",
        choices=("text", "program", "timeline", "svg"),
        default="text",
        help="text: the actions (default); program: with sends and receives; timeline: drawn in the terminal; svg: a picture",
    )
    add_output(show, "write there instead of to the terminal; svg needs it")
    add_open(show)
    words = "(CONFIG [--gpus N] [section.key=value ...] | --pp P [--vpp V] --microbatches M) [options]"
    summary = "prove that a schedule is complete, in order and free of deadlock under rules stricter than NCCL's"
    add_sizes(parser.add_verb("check", summary, words, CHECK_EXAMPLES))
    summary = "time a step's actions and messages: bubble, critical path, what is kept"
    times = parser.add_verb("times", summary, words, TIMES_EXAMPLES)
    add_sizes(times)
    times.add_argument(
        "--cluster",
        metavar="FILE|NxGPU",
        help="with a config: seconds on this cluster, such as 64xH100 (default: FLOPs)",
    )
    times.add_argument(
        "--transfer", type=float, metavar="T", help="time of a message (default: 0; with --cluster, the cluster's)"
    )


def add_sizes(parser: CommandParser) -> None:
    """Add a config argument, and options with the pipeline's sizes to use without a config."""
    parser.takes(CONFIG, "sizes of this run, in place of --pp --vpp --microbatches --name", required=False)
    add_world_size(parser, "with a config: ranks, from which the data-parallel size follows")
    parser.add_argument(
        "--dp",
        type=int,
        metavar="N",
        help="with a config: data-parallel size (default: the config's, or one that leaves 4 microbatches per rank)",
    )
    parser.add_argument("--pp", type=int, metavar="P", help="pipeline ranks")
    parser.add_argument("--vpp", type=int, metavar="V", help="model chunks per rank (default: 1)")
    parser.add_argument("--microbatches", type=int, metavar="M", help="microbatches per step of one pipeline")
    parser.add_argument(
        "--name",
        metavar="NAME",
        help=f"auto (default: 1f1b, interleaved when vpp > 1), {', '.join(schedules.BUILDERS)}",
    )


def run(args: argparse.Namespace) -> int:
    """Print, check or time a schedule. Returns 0 if it is correct, otherwise raises ScheduleError or ConfigError."""
    console = Console(highlight=False, soft_wrap=True)
    if args.verb == "times":
        _times(console, args)
        return 0
    schedules_of_a_run = [asked_for(args)] if args.config is None else _of_config(console, args)
    if args.verb == "print":
        _print(console, schedules_of_a_run[0], args)
    else:
        _check(console, schedules_of_a_run, args)
    return 0


def asked_for(args: argparse.Namespace) -> Schedule:
    """Build the schedule for the sizes on the command line.

    Raises:
        ScheduleError: a size is missing, wrong or too large, an argument needs a config, or no schedule has that name.
        ConfigError: the schedule with that name cannot have this vpp.
    """
    from triaxis.engine.config.rules.layout import schedule_problems

    if useless := [*typed(args, "dp", "world_size"), *args.overrides]:
        raise ScheduleError(
            f"{', '.join(useless)} without a config: --microbatches counts those of one pipeline already, so it would do nothing. "
            "Leave it out, or name a config."
        )
    if args.pp is None or args.microbatches is None:
        missing = [f"--{name}" for name in ("pp", "microbatches") if getattr(args, name) is None]
        raise ScheduleError(
            f"{' and '.join(missing)} not given: a schedule follows from the pipeline ranks and the microbatches. "
            "Example: --pp 4 --microbatches 8"
        )
    vpp = 1 if args.vpp is None else args.vpp
    _check_size(args.pp, vpp, args.microbatches)
    name = args.name or "auto"
    if name not in ("auto", *schedules.BUILDERS):
        raise ScheduleError(
            f"--name {name}: there is no such schedule, so no rank knows what to compute. The names are auto, "
            f"{', '.join(schedules.BUILDERS)}."
        )
    refuse(str(problem) for problem in schedule_problems(name, vpp))
    return schedules.build(name, args.pp, vpp, args.microbatches)


def _check_size(pp: int, vpp: int, num_microbatches: int) -> None:
    """Refuse a schedule with more than `MOST_PASSES` forward passes."""
    passes = max(pp, 0) * max(vpp, 0) * max(num_microbatches, 0)
    if passes > MOST_PASSES:
        raise ScheduleError(
            f"--pp {shown(pp)} --vpp {shown(vpp)} --microbatches {shown(num_microbatches)}: a schedule lists each forward and each "
            f"backward, here {shown(passes)} of both, and at most {MOST_PASSES:,} can be looked at; more would take hours and "
            "gigabytes. The pattern repeats, so give fewer microbatches."
        )


def _of_config(console: Console, args: argparse.Namespace) -> list[Schedule]:
    """Build a run's schedules, for a training step and for a validation.

    `triaxis schedule check` also prints the pipeline's sizes and the batch here.
    """
    from triaxis.engine.config.quantities.plan import batch_plan

    config, dp = _read(args)
    note = "" if dp else " (dp is open: --gpus N says another)"
    parallel, plan = config.parallel, batch_plan(config, dp or usual_dp(config))
    if args.verb == "check":
        console.print(f"{args.config}: pp {parallel.pp}, vpp {parallel.vpp}; {plan}{note}")
    training = schedules.of_config(config, parallel.pp, parallel.vpp, plan.num_microbatches)
    return [training, forward_only(training.placement, plan.num_microbatches)]


def _read(args: argparse.Namespace) -> "tuple[Config, int | None]":
    """Read the config and its data-parallel size. The size is None if nothing sets it."""
    from triaxis.engine.config.load import load_config
    from triaxis.engine.config.quantities.plan import data_parallel_size

    if given := typed(args, "pp", "vpp", "microbatches", "name"):
        raise ScheduleError(
            f"{args.config} together with {', '.join(given)}: the config sets these sizes too, so it would be unclear "
            "which were meant. Give only one; to change a size of the config, write an override, such as parallel.pp=4."
        )
    check_counts(dp=args.dp, world_size=args.world_size)
    if args.dp is not None and args.world_size is not None:
        raise ScheduleError("--dp together with --gpus: both set the number of replicas. Give one of them.")
    config = load_config(
        args.config, args.overrides, os.environ, world_size=args.world_size, more_rules=[schedule_file_runs]
    )
    return config, args.dp or data_parallel_size(config.parallel, args.world_size)


def usual_dp(config: "Config") -> int:
    """Largest data-parallel size that leaves each pipeline at least `USUAL_ROUNDS` x pp microbatches.

    All pipelines have equally many microbatches, a multiple of pp. If no size allows this, the size is 1.

    With a schedule file, each pipeline gets the file's number of microbatches.
    """
    from triaxis.engine.config.rules.problem import divisors

    if (file := config.schedule.file) is not None:
        return max(1, config.train.global_batch_size // (config.train.micro_batch_size * file.text.num_microbatches))
    num_microbatches, pp = config.train.global_batch_size // config.train.micro_batch_size, config.parallel.pp
    most = num_microbatches // (USUAL_ROUNDS * pp)
    return next((dp for dp in divisors(num_microbatches, most) if dp <= most and num_microbatches // dp % pp == 0), 1)


def _print(console: Console, schedule: Schedule, args: argparse.Namespace) -> None:
    form, out = args.form, args.output
    if args.open and form != "svg":
        refuse([f"--open with --form {form}: it is text. Add --form svg."])
    if form == "svg":
        if out is None:
            raise ScheduleError(
                "--form svg without --output: a terminal shows no picture. Add --output schedule.svg, or take --form timeline."
            )
        draw_schedule(in_forwards(schedule), out)
    else:
        # A long picture is folded on a screen, and keeps its full width in a file or a pipe.
        width = console.width if console.is_terminal and out is None else None
        shown: Text | str
        if form == "timeline":
            shown = render_timeline(in_forwards(schedule), width).append("\n")
        else:
            shown = to_text(schedule) if form == "text" else program_to_text(lower(schedule))
        if out is None:
            console.print(shown, end="", markup=False)
        else:
            write_output(out, str(shown))
    if out is not None:
        console.print(f"wrote {out}")
        open_page(args, out)
    print_json(args, {**_names(schedule), "actions": [list(map(str, row)) for row in schedule.actions]})


def _check(console: Console, to_check: list[Schedule], args: argparse.Namespace) -> None:
    shown = []
    for schedule in to_check:
        facts = Programs(schedule).facts
        placement = schedule.placement
        console.print(
            f"{schedule.name}, pp {placement.pp}, vpp {placement.vpp}, {schedule.num_microbatches} microbatches: complete, "
            "in order, every send received, no deadlock under NCCL's rules, with early and with late receives"
        )
        timeline = in_forwards(schedule)
        columns = {
            "most in flight": facts.peak_in_flight,
            **({"most held": facts.peak_held} if any(facts.peak_held) else {}),
            "early receives": facts.peak_early_receives,
            "sends + receives": facts.num_transfers,
        }
        table = terminal_table("rank", *columns, "idle")
        for rank, values in enumerate(zip(*columns.values(), strict=True)):
            table.add_row(str(rank), *map(str, values), f"{timeline.bubble_fraction(rank):.1%}")
        console.print(table)
        shown.append({**_names(schedule), **{name.replace(" ", "_"): list(values) for name, values in columns.items()}})
    console.print(
        "in flight: microbatch-chunks whose activations are kept; held: those whose weight gradients wait; "
        "early receives: per direction and chunk; "
        "idle: of the span, a backward taking 2 forwards and transfers nothing"
    )
    print_json(args, shown)


def _times(console: Console, args: argparse.Namespace) -> None:
    """Simulate a step's actions and messages, and print the times."""
    if args.transfer is not None and not 0 <= args.transfer < math.inf:
        raise ScheduleError(
            f"--transfer {args.transfer}: what ends before it starts, or never, cannot be timed. Give a time of 0 or more."
        )
    if args.config is None:
        if args.cluster is not None:
            raise ScheduleError("--cluster without a config: seconds follow from the sizes of a model. Name a config.")
        schedule, unit = asked_for(args), "forwards of a stage"
        costs = Costs.uniform(schedule.placement.num_stages)
    else:
        schedule, costs, unit = _of_model(args)
    costs = costs if args.transfer is None else replace(costs, transfer=args.transfer)

    timeline = simulate(schedule, costs)
    waits, path, placement = rank_waits(timeline), critical_path(timeline), schedule.placement
    console.print(
        f"{schedule.name}, pp {placement.pp}, vpp {placement.vpp}, {schedule.num_microbatches} microbatches; unit of time: {unit}"
    )
    console.print(
        f"span {significant(timeline.span)}, bubble {timeline.largest_bubble_fraction:.2%} of it on the rank that waits most"
    )
    console.print(rank_table(timeline, waits, Programs(schedule).facts))
    console.print(f"critical path: {path_summary(path)}")
    for line in path_lines(path):
        console.print(f"  {line}", markup=False)
    console.print(
        "bubble: what the rank needs is not computed yet; messages: it is computed and on its way; in flight: microbatch-chunks "
        "whose activations are kept; held: those whose weight gradients wait"
    )
    ranks = [{"rank": rank, "busy": timeline.busy(rank), **one._asdict()} for rank, one in enumerate(waits)]
    print_json(args, {**_names(schedule), "unit": unit, "span": timeline.span, "ranks": ranks})


def _names(schedule: Schedule) -> dict[str, object]:
    placement = schedule.placement
    return {"name": schedule.name, "pp": placement.pp, "vpp": placement.vpp, "microbatches": schedule.num_microbatches}


def _of_model(args: argparse.Namespace) -> tuple[Schedule, Costs, str]:
    """Build the schedule for a config's training step, its stage costs, and their unit."""
    from triaxis.engine.config.quantities.plan import parallel_sizes
    from triaxis.models.predict.step_time.cluster import cluster_at
    from triaxis.models.predict.step_time.estimate import Estimator
    from triaxis.models.predict.step_time.flops_costs import UNIT, flops_costs

    config, dp = _read(args)
    parallel = config.parallel.model_copy(update={"dp": dp or usual_dp(config)})
    sizes = parallel_sizes(config.model_copy(update={"parallel": parallel}))
    schedule = schedules.of_step(config, sizes)
    if args.cluster is not None:
        return schedule, Estimator(cluster_at(args.cluster)).costs(config, sizes), f"seconds on {args.cluster}"
    across = "" if config.data.attention == "across" else ", as if tokens attended across documents"
    return schedule, flops_costs(config, sizes), UNIT + across
