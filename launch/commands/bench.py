"""`triaxis bench` measures how fast a config trains here, or how fast the device is.

CONFIG     ->  a few training steps of each layout, on random tokens: speed, memory and time of each
--ranks    ->  the same for one layout on several numbers of ranks, with the speed-up and what reduces it
--device   ->  a file with this device's rates in matrix products, attention, memory and calls, to predict step times
"""

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from triaxis.engine.config.schema.layout import ParallelConfig
from triaxis.engine.config.schema.training import MOST_STEPS
from triaxis.engine.device.gpus import find_gpus
from triaxis.engine.errors import TriaxisError, counted
from triaxis.launch.start import hostfile
from triaxis.launch.start.command_line import (
    CONFIG,
    LAYOUT_WORDS,
    CommandParser,
    above,
    add_dry_run,
    add_json,
    add_output,
    add_world_size,
    check_counts,
    layout_overrides,
    print_json,
    refuse,
    typed,
)
from triaxis.launch.start.srun_task import is_rank
from triaxis.launch.start.world import TooFewGpusError
from triaxis.launch.tuning.layouts import (
    LEAST_STEPS,
    STOPPED,
    Failed,
    LayoutResult,
    refused,
    show_plan,
    try_layout,
    write_config,
)
from triaxis.launch.tuning.report import Tried, look_at_machine, to_json, to_text
from triaxis.launch.tuning.scaling import draw_scaling, scaling_of, scaling_text

EXAMPLES = """examples:
  triaxis bench configs/gpt_tiny.yaml
  triaxis bench configs/gpt_tiny.yaml --steps 10 --layouts 'tp=1;tp=2;tp=2,pp=2' --output tried.json
  triaxis bench gpt_tiny --ranks 1,2,4 --output speedup.svg
  triaxis bench configs/llama3_8b.yaml --gpus 8 --layouts 'tp=1;tp=2,sp=true' model.num_layers=4
  triaxis bench --device --output this_machine.yaml
  OMP_NUM_THREADS=1 triaxis bench --device cpu --output this_cpu.yaml

Each layout is a separate training run on the ranks that `triaxis train` would start on this machine, in a temporary folder: no
corpus, no warm-up of the learning rate, no checkpoint, no wandb. A layout that is illegal, does not fit or breaks is listed with
its reason. The block on stdout at the end is made to be pasted. Exit code 0: a layout was trained; 1: none was.

A device's file has the form of configs/devices/*.yaml, and the last line that is printed is a cluster of two ranks of this
machine. Leave the machine alone meanwhile: it takes about a minute.
"""
DEFAULT_STEPS = 20
OWN = "the config's own"
AUTO = "auto"
NOTHING_TRAINED = 1


def add_arguments(parser: CommandParser) -> None:
    parser.usage = (
        "triaxis bench (CONFIG [--layouts 'tp=N,pp=N;...'] [--ranks N,N,...] [section.key=value ...] | --device --output FILE) "
        "[options]"
    )
    parser.epilog = EXAMPLES
    parser.takes(CONFIG, "model and batch to train", required=False)
    parser.add_argument(
        "--steps",
        type=int,
        default=DEFAULT_STEPS,
        metavar="K",
        help=f"optimizer steps of each layout (default: {DEFAULT_STEPS}; the first quarter is left out of the speeds)",
    )
    parser.add_argument(
        "--layouts",
        metavar="'tp=N,pp=N;...'",
        help=f"layouts, separated by ';'. Each is of {', '.join(LAYOUT_WORDS)}; what is not named is 1 (sp: off; dp: as "
        "many as there are ranks for). Default: the config's own",
    )
    add_world_size(parser, "ranks of each layout whose dp is open (default: the GPUs; on a CPU one replica)")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="trace one more step, and print calls and time of a layer beside the prediction",
    )
    parser.add_argument(
        "--ranks",
        type=_numbers,
        metavar="N,N,...",
        help="speed-up of one layout (default: data parallel) on these numbers of ranks; with --device, the ranks that will share "
        "a CPU (default: 1; no effect on a GPU)",
    )
    add_json(parser)
    add_output(
        parser,
        "write all numbers (.json) or with --ranks a picture (.svg) there; with --device, the device's file (.yaml)",
    )
    add_dry_run(parser, "print the launch line of each layout; start nothing")
    device = parser.add_argument_group("the device instead")
    device.add_argument(
        "--device",
        choices=(AUTO, "cpu", "cuda"),
        nargs="?",
        const=AUTO,
        help="measure this machine's device (default: the first GPU where torch can use one, else the CPU)",
    )
    device.add_argument("--name", metavar="NAME", help="of the device in plans (default: the file's name)")


def run(args: argparse.Namespace) -> int:
    """Train the config in each requested layout and print the results, or measure the device.

    Without `--layouts` and `--ranks`, it is the config's own layout. Returns the exit code.

    Raises:
        ConfigError: neither a config nor --device is given, or arguments contradict each other.
        OutputError: the device file cannot be written.
    """
    refuse(_problems(args))
    if args.device is None:
        return _layouts(args)
    _device(args)
    return 0


def _problems(args: argparse.Namespace) -> Iterator[str]:
    if args.device is None:
        if of_device := typed(args, "name"):
            yield f"{', '.join(of_device)} without --device: no device is measured, and nothing would be written. Add --device."
        elif args.output is not None and args.output.suffix not in (".json", *([".svg"] if args.ranks else [])):
            yield (
                f"--output {args.output}: numbers end in .json, the picture of --ranks in .svg, and --device, for a device's "
                "file, is not given. Correct one."
            )
        elif args.config is None:
            yield "bench needs a config, such as gpt_tiny, or --device and --output: there is nothing to measure. Name one."
        return
    if args.ranks is not None and len(args.ranks) != 1:
        yield f"--device with --ranks {','.join(map(str, args.ranks))}: a device has one number of ranks that share it. Name one."
    config = [] if args.config is None else [str(args.config)]
    if of_config := [*config, *args.overrides, *typed(args, "layouts", "json", "world_size", "profile", "dry_run")]:
        yield f"--device with {', '.join(of_config)}: the device is measured without a model. Leave one out."
    if args.output is None:
        yield "--device without --output: the rates would be lost. Give the device's file, such as --output this_machine.yaml."
    elif args.output.suffix != ".yaml":
        yield f"--output {args.output}: a device's file ends in .yaml, or no plan would find it. Rename it."


def _device(args: argparse.Namespace) -> None:
    """Measure this machine's device and write its rates to the YAML file given with `--output`."""
    from triaxis.launch.tuning.calibrate import write_device

    (num_ranks,) = args.ranks or [1]
    check_counts(ranks=num_ranks)
    gpus = find_gpus(os.environ)
    if args.device == "cuda" and not gpus.count:
        refuse([f"--device cuda: torch finds no GPU here. {gpus.problem or gpus.note} Measure the CPU."])
    kind = args.device if args.device != AUTO else "cuda" if gpus.count else "cpu"
    write_device(args.output, args.name or args.output.stem, kind, num_ranks)


def _layouts(args: argparse.Namespace) -> int:
    _refuse_other_launchers()
    check_counts(world_size=args.world_size)
    if args.steps < LEAST_STEPS:
        refuse(
            [f"--steps {args.steps}: at least {LEAST_STEPS}: one step warms up, and the last one ends the measurement."]
        )
    refuse(above("steps", args.steps, MOST_STEPS, "no run makes more"))
    asked = list(_asked(args))
    outcomes: list[LayoutResult | Failed] = []
    with tempfile.TemporaryDirectory(prefix="triaxis-bench-") as name:
        for number, (label, change, num_ranks) in enumerate(asked, start=1):
            if not args.dry_run:
                print(f"layout {number} of {len(asked)}: {label}, {args.steps} steps ...", file=sys.stderr, flush=True)
            with _ranks(num_ranks):
                outcome = _try(args, label, change, Path(name), f"layout_{number}")
            if outcome is None:
                continue
            outcomes.append(outcome)
            if isinstance(outcome, Failed) and outcome.exit_code in STOPPED:
                print("stopped: no further layout is tried", file=sys.stderr)
                return outcome.exit_code
            _print_outcome(outcome)
    if args.dry_run:
        return NOTHING_TRAINED if outcomes else 0
    measured = [one for one in outcomes if isinstance(one, LayoutResult)]
    tried = Tried(
        words=_words(args, args.layouts),
        name=args.config.stem,
        num_steps=args.steps,
        machine=look_at_machine(is_gpu=measured[0].is_gpu if measured else find_gpus(os.environ).count > 0),
        outcomes=outcomes,
    )
    print(to_text(tried), end="")
    numbers, picture = to_json(tried), args.output if args.output is not None and args.output.suffix == ".svg" else None
    if args.ranks and measured:
        rows = scaling_of(measured)
        print(f"\n{scaling_text(rows)}", end="")
        numbers["scaling"] = [asdict(row) for row in rows]
        if picture is not None:
            draw_scaling(rows, f"Speed-up of {args.config.stem} on {tried.machine.device}", picture)
    print_json(args, numbers, args.output if picture is None else None)
    return 0 if measured else NOTHING_TRAINED


def _asked(args: argparse.Namespace) -> Iterator[tuple[str, list[str], int | None]]:
    """Yield each run as (name, overrides, number of ranks). None is the launcher's default number.

    Raises:
        ConfigError: --layouts names no layout, or --ranks repeats a number or is given with several layouts or --gpus.
    """
    layouts = [] if args.layouts is None else [text.strip() for text in args.layouts.split(";") if text.strip()]
    if args.layouts is not None and not layouts:
        refuse(["--layouts names none. Write for example --layouts 'tp=1;tp=2'."])
    if args.ranks is None:
        for text in layouts or [OWN]:
            yield text, [] if text == OWN else layout_overrides(text, dp_is_open=True), args.world_size
        return
    check_counts(ranks=min(args.ranks))
    if args.world_size is not None or len(layouts) > 1 or len(set(args.ranks)) != len(args.ranks):
        refuse(
            [
                "--ranks compares different numbers of ranks of one layout: --gpus, several --layouts or a number twice would "
                "compare something else. Leave them out."
            ]
        )
    for num_ranks in args.ranks:
        yield (
            counted(num_ranks, "rank"),
            layout_overrides(layouts[0] if layouts else "tp=1", dp_is_open=True),
            num_ranks,
        )


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, such as 1,2,4") from None


def _try(
    args: argparse.Namespace, label: str, change: Sequence[str], folder: Path, name: str
) -> LayoutResult | Failed | None:
    """Train one layout, and return its measurements or why it failed. A dry run only prints how it would start."""
    try:
        overrides = (*args.overrides, *change)
        path = write_config(args.config, overrides, args.steps, folder, name, os.environ, profiles=args.profile)
        if not args.dry_run:
            return try_layout(path, label, folder / f"{name}.log")
        show_plan(path)
    except TooFewGpusError as error:
        # Caught before the other problems of a layout: the advice is a command like this one, with a layout that fits.
        return Failed(label, f"{error.needs}.{_that_fits(args, error.smaller)}", error.exit_code)
    except TriaxisError as error:
        return refused(label, error)
    return None


def _print_outcome(outcome: LayoutResult | Failed) -> None:
    """Print a layout's outcome on stderr, with the last output of a run that broke."""
    if isinstance(outcome, LayoutResult):
        print(f"  {outcome.layout}: {outcome.tokens_per_second:,.0f} tokens/s on {outcome.num_ranks}", file=sys.stderr)
        return
    print(f"  not trained: {outcome.reason}", file=sys.stderr)
    for line in outcome.output.splitlines():
        print(f"  | {line}", file=sys.stderr)


def _that_fits(args: argparse.Namespace, smaller: ParallelConfig | None) -> str:
    """Advise the command that benchmarks the layout `smaller`. If `smaller` is None, say that no smaller layout is legal."""
    if smaller is None:
        return " No smaller layout keeps the rules of this config."
    sizes = [f"{name}={getattr(smaller, name)}" for name in ("tp", "pp", "vpp", "ep", "etp")]
    layout = ",".join([*(size for size in sizes if not size.endswith("=1")), f"dp={smaller.dp}"])
    return f" A layout that fits is tried by\n{shlex.join(_words(args, layout))}"


def _words(args: argparse.Namespace, layouts: str | None) -> list[str]:
    """Build the command line that repeats this benchmark, or runs it with other layouts."""
    options = ["--steps", str(args.steps)]
    options += [] if layouts is None else ["--layouts", layouts]
    options += [] if args.ranks is None else ["--ranks", ",".join(map(str, args.ranks))]
    options += [] if args.world_size is None else ["--gpus", str(args.world_size)]
    options += ["--profile"] if args.profile else []
    return ["triaxis", "bench", str(args.config), *options, *args.overrides]


def _refuse_other_launchers() -> None:
    """Refuse to run as one rank of a job, or on several nodes.

    Raises:
        ConfigError: another launcher started this process, or the environment asks for several nodes.
    """
    several = os.environ.get("NNODES", "") not in ("", "1") or hostfile.is_asked_for(os.environ)
    if "RANK" in os.environ or is_rank(os.environ) or several:
        why = "under torchrun, srun, HOSTFILE or NNODES each process would try the layouts for itself"
        refuse(
            [f"triaxis bench starts its ranks itself, on one machine: {why}. Start it once, without them."],
            "the environment",
        )


@contextmanager
def _ranks(world_size: int | None) -> Iterator[None]:
    """Set NPROC_PER_NODE, the number of ranks that the launcher starts, and restore it after. None leaves it as it is."""
    before = os.environ.get("NPROC_PER_NODE")
    if world_size is not None:
        os.environ["NPROC_PER_NODE"] = str(world_size)
    try:
        yield
    finally:
        if before is not None:
            os.environ["NPROC_PER_NODE"] = before
        elif world_size is not None:
            del os.environ["NPROC_PER_NODE"]
