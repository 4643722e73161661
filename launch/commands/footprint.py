"""`triaxis footprint`: what one rank of any layout keeps, sends and computes in a step, without the machines."""

import argparse
import json
import os
import re
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from engine.config import Config, parallel_sizes
from engine.config_load import load_config
from engine.errors import ConfigError
from launch.commands.verify import layout_overrides

if TYPE_CHECKING:
    from engine.footprint.run import Footprint

NAME = "footprint"
HELP = "Run one rank's training step on tensors without memory; print its bytes, calls and operators."
EXAMPLES = """examples:
  triaxis footprint --config configs/gpt_tiny.yaml --layout tp=2,pp=2,vpp=2,dp=2,sp=true --rank 5
  triaxis footprint --config configs/gpt_tiny.yaml --layout tp=2,pp=4,dp=64 --rank 511 train.global_batch_size=1024 --json step.json

It is the engine's own code in one process: the ranks beside it do not exist, and any layout can be looked at. Bytes are those
that tensors hold; an allocator rounds up. Kernels are the CPU's, whose attention keeps other small tensors than a GPU's.
"""

GIB = 2**30
UNITS = (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10))
SHOWN_OPS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "triaxis footprint --config config.yaml [section.key=value ...] --rank N [--layout tp=..,pp=..] [options]"
    )
    parser.epilog = EXAMPLES
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the run to look at")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as for training")
    parser.add_argument("--layout", metavar="tp=N,pp=N,...", help="as for `triaxis verify`; default: the config's own")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="which rank (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here as well")


def run(args: argparse.Namespace) -> int:
    """Print the footprint of one rank."""
    layout = [] if args.layout is None else layout_overrides(args.layout)
    config = load_config(args.config, (*args.overrides, *layout), os.environ)
    if config.parallel.dp is None:
        raise ConfigError(
            ["parallel.dp is open, and there is no machine whose size could fill it. Give it: --layout ..,dp=N"],
            str(args.config),
        )
    # torch is imported where it is needed: `--help` and mistakes are answered at once.
    from engine.footprint.run import footprint
    from models.gpt import build_chunks

    print(f"one step of rank {args.rank} of {parallel_sizes(config).world_size:,} ...", file=sys.stderr)
    found = footprint(config, args.rank, build_chunks)
    show(Console(highlight=False, soft_wrap=True), config, args.rank, found)
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(config, args.rank, found), indent=2) + "\n")
    return 0


def show(console: Console, config: Config, rank: int, found: "Footprint") -> None:
    """Memory, saved tensors, traffic and operators."""
    stages = ", ".join(map(str, found.stages))
    console.print(
        f"[bold]rank {rank}[/] ({found.coordinates}), stage{'s' if len(found.stages) > 1 else ''} {stages}, of "
        f"{parallel_sizes(config)}; {found.num_microbatches} microbatches of {config.train.micro_batch_size}"
    )
    memory = _table("memory", "kind", "at the peak", "most of the kind")
    for kind, most in found.most.items():
        if most:
            memory.add_row(kind, in_bytes(found.peak.by_kind.get(kind, 0)), in_bytes(most))
    memory.add_row("all", in_bytes(found.peak.total), "", style="bold")
    console.print(memory)

    saved = _table("kept by a microbatch for its backward", "by", "tensor", "bytes", "times")
    for (site, tensor, num_bytes), times in _alike(found).items():
        saved.add_row(site, tensor, in_bytes(num_bytes), str(times))
    saved.add_row("all", "", in_bytes(sum(one.num_bytes for one in found.saved)), "", style="bold")
    console.print(saved)

    traffic = _table("sent in a step", "axis and purpose", "operation", "calls", "wire bytes")
    for (axis, purpose, op), (calls, num_bytes) in _traffic(found).items():
        traffic.add_row(f"{axis}, {purpose}", op.replace("_", "-"), f"{calls:,}", in_bytes(num_bytes))
    console.print(traffic if found.events else "nothing is sent: one rank")

    most_common = ", ".join(
        f"{name.removeprefix('aten::')} {count:,}" for name, count in found.ops.most_common(SHOWN_OPS)
    )
    console.print(f"operators: {sum(found.ops.values()):,} dispatched; most often {most_common}", style="dim")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for index, column in enumerate(columns):
        numbers = index and column != "operation" and column != "tensor"
        table.add_column(column, justify="right" if numbers else "left", no_wrap=True)
    return table


def _alike(found: "Footprint") -> Counter[tuple[str, str, int]]:
    """(where, tensor, bytes), as often as it is in layers and chunks that are alike, in the order of the first."""
    rows: Counter[tuple[str, str, int]] = Counter()
    for one in found.saved:
        site = re.sub(r"\.\d+\.", ".N.", re.sub(r"^chunk \d+: ", "", one.site)) or "(the chunk itself)"
        rows[site, f"{list(one.shape)} {str(one.dtype).removeprefix('torch.')}", one.num_bytes] += 1
    return rows


def _traffic(found: "Footprint") -> dict[tuple[str, str, str], tuple[int, int]]:
    """(calls, ring bytes) by axis, purpose and operation."""
    from models.traffic import measured_traffic

    volumes = measured_traffic(found.events)
    return {
        (flow.axis, flow.purpose, flow.op): (volume.calls, volume.wire_bytes)
        for flow, volume in sorted(volumes.items())
    }


def as_json(config: Config, rank: int, found: "Footprint") -> dict[str, object]:
    """All numbers, in bytes."""
    return {
        "rank": rank,
        "coordinates": asdict(found.coordinates),
        "layout": str(parallel_sizes(config)),
        "stages": found.stages,
        "num_microbatches": found.num_microbatches,
        "state_bytes": found.state,
        "peak_bytes": found.peak.by_kind,
        "most_bytes": found.most,
        "saved": [asdict(one) | {"dtype": str(one.dtype).removeprefix("torch.")} for one in found.saved],
        "traffic": [
            {"axis": axis, "purpose": purpose, "op": op, "calls": calls, "wire_bytes": num_bytes}
            for (axis, purpose, op), (calls, num_bytes) in _traffic(found).items()
        ],
        "ops": dict(Counter(found.ops)),
    }


def in_bytes(num_bytes: int) -> str:
    """`1.25 GiB`."""
    for unit, size in UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes:,} B"
