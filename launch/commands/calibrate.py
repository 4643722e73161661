"""`triaxis calibrate`: measure this machine's device, for predictions of step times."""

import argparse
import math
import os
from pathlib import Path

from rich.console import Console

from triaxis.engine.device.gpus import find_gpus
from triaxis.engine.errors import ConfigError
from triaxis.engine.storage.files import write_atomically
from triaxis.engine.storage.redaction import unwritable
from triaxis.launch.start.command_line import CommandParser, check_counts

EXAMPLES = """examples:
  triaxis calibrate --out this_machine.yaml
  OMP_NUM_THREADS=1 triaxis calibrate --device cpu --out this_cpu.yaml

The file has the form of configs/devices/*.yaml, and the line at the end is a cluster's file for two ranks of this machine. Leave
the machine alone meanwhile: it takes about a minute.
"""


def add_arguments(parser: CommandParser) -> None:
    parser.usage = "triaxis calibrate --out FILE [--device cpu|cuda] [--ranks N] [--name NAME]"
    parser.epilog = EXAMPLES
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the device's file to write (.yaml)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: the first GPU where torch can use one, else the CPU"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="ranks that will share a CPU: the others multiply matrices meanwhile (default: 1; no effect on a GPU)",
    )
    parser.add_argument("--name", metavar="NAME", help="of the device in plans (default: the file's name)")


def run(args: argparse.Namespace) -> int:
    """Measure, and write the device's file.

    Raises:
        OutputError: the file cannot be written.
    """
    import torch
    import yaml

    from triaxis.launch.tuning.calibrate import measure_device

    if args.out.suffix != ".yaml":
        raise ConfigError([f"--out {args.out}: a device's file ends in .yaml, or no plan would find it. Rename it."])
    check_counts(ranks=args.ranks)
    gpus = find_gpus(os.environ)
    if args.device == "cuda" and not gpus.count:
        raise ConfigError([f"--device cuda: torch finds no GPU here. {gpus.problem or gpus.note} Measure the CPU."])
    device = torch.device(args.device or ("cuda" if gpus.count else "cpu"))
    if device.type == "cpu":
        # As many as a rank has; a bare torch would take all cores.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    console = Console(highlight=False, soft_wrap=True)
    values = measure_device(
        args.name or args.out.stem, device, lambda what: console.print(f"  {what} ..."), num_ranks=args.ranks
    )
    link = values.pop("collective_gb_per_s")
    text = f"# Measured by triaxis calibrate on {device.type}; rates of ranks with {torch.get_num_threads()} CPU thread(s).\n"
    text += yaml.safe_dump(values, sort_keys=False, width=200)
    try:
        write_atomically(args.out, [text.encode()])
    except OSError as error:
        raise unwritable(f"{args.out}", error) from error
    peaks = ", ".join(f"{dtype} {tflops:g} TFLOP/s" for dtype, tflops in values["peak_tflops"].items())
    console.print(
        f"wrote {args.out}: {peaks}; memory {values['memory_gb_per_s']:g} GB/s; host {values['host_us']:g} us per kernel; "
        f"a call of two ranks {values['collective_us']:g} us"
    )
    if math.isfinite(link):
        console.print(
            "cluster of two ranks:  "
            f"{{device: {args.out}, nodes: 1, gpus_per_node: 2, nvlink_gb_per_s: {link:g}, network_gb_per_s: {link:g}, "
            f"network_latency_us: {values['collective_us']:g}, oversubscription: 1.0, price_per_gpu_hour: 0.0}}"
        )
    return 0
