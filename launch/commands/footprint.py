"""`triaxis footprint` shows memory, traffic and operators of a rank's step, without the machines."""

import argparse
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes, stages_of
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.tree import Config
from triaxis.engine.telemetry.outlets.format import in_bytes
from triaxis.launch.pictures.tables import terminal_table
from triaxis.launch.start.command_line import (
    CONFIG,
    CommandParser,
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
from triaxis.launch.start.launcher import Request, launch
from triaxis.launch.start.wide_console import wide_console

if TYPE_CHECKING:
    import torch

    from triaxis.launch.footprint.run import Footprint, Footprints

EXAMPLES = """examples:
  triaxis footprint configs/gpt_tiny.yaml --layout tp=2,pp=2,vpp=2,dp=2,sp=true --rank 5
  triaxis footprint configs/llama3_8b.yaml --gpus 64 --full
  triaxis footprint configs/llama3_8b_128k.yaml --gpus 64 kernels.attention=varlen
  triaxis footprint configs/gpt_tiny.yaml --layout tp=2,pp=4,dp=64 --rank 511 train.global_batch_size=1024 --output step.json
  triaxis footprint configs/gpt_tiny.yaml --layout tp=2,pp=2,dp=1 --replay
  triaxis footprint configs/gpt_tiny.yaml --layout tp=2,pp=2,dp=2 --rank 5 --real
  triaxis footprint configs/gpt_tiny.yaml --measured
  triaxis footprint configs/llama3_8b.yaml --gpus 64 --ladder

The engine's own code runs in one process without the other ranks, so any layout can be examined. Bytes are those
that tensors hold; an allocator rounds up. Kernels are those of the CPU, whose attention keeps other small tensors than a GPU's.
With documents, windows or cp, kernels.attention=varlen takes the GPU's. docs/footprint.md says more.
--measured starts all ranks for one real step. Exit code 1 if the calls or bytes of any rank differ from the config's prediction.
"""

MODES = {
    "replay": ("a replay is of the calls of all ranks", "rank", "real"),
    "measured": ("all ranks run a real step", "rank", "replay", "real", "full", "json", "output", "world_size"),
    "ladder": ("the ladder predicts", "rank", "replay", "real", "full", "measured"),
}
"""Options that run something else than a rank's step, with what they run and the options that do nothing with them."""
SHOWN_OPS = 4
REAL_STEPS = 3
MOST_RANKS_OF_A_WHOLE_REPLAY = 16
"""Up to this many ranks, each rank is run; in a larger layout one rank represents its stage."""
DEVICE = "H100"


def add_arguments(parser: CommandParser) -> None:
    parser.usage = "triaxis footprint CONFIG [--real | --replay | --measured | --ladder] [options]"
    parser.epilog = EXAMPLES
    parser.takes(CONFIG, "the run to examine")
    add_world_size(parser, "ranks of the run, from which parallel.dp follows where it is open")
    parser.add_argument("--layout", metavar="tp=N,pp=N,...", help="as for `triaxis verify`; default: the config's own")
    parser.add_argument(
        "--rank", type=int, action="append", metavar="N", help="rank to run; may be repeated (default: 0)"
    )
    parser.add_argument("--full", action="store_true", help="run every microbatch, and add none up from others like it")
    parser.add_argument(
        "--replay",
        action="store_true",
        help="instead of a rank's tables: replay the calls of all ranks together under NCCL's rules",
    )
    parser.add_argument(
        "--real",
        action="store_true",
        help="then run the rank's steps on the GPU (or CPU) that is here: its kernels, allocator and time, without a network",
    )
    parser.add_argument(
        "--measured",
        action="store_true",
        help="instead: start all ranks for a real step; compare bytes and calls per axis with the prediction (exit code 1)",
    )
    parser.add_argument(
        "--ladder",
        action="store_true",
        help="instead, and without a run: predicted memory and seconds with parallel.zero 1 to 3, without and with "
        "optimizer.offload, as one table",
    )
    parser.add_argument(
        "--gpu-kind", metavar="GPU", help=f"with --ladder: GPUs that the run is predicted for (default: {DEVICE})"
    )
    add_dry_run(parser, "with --measured: print the launch line; start nothing")
    add_json(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Print ranks' footprints or ZeRO stages, replay calls, or measure a real step. Returns the exit code."""
    refuse(_problems(args))
    if args.measured:
        overrides = [*args.overrides, *(layout_overrides(args.layout) if args.layout else [])]
        worker = "triaxis.launch.footprint.traffic"
        return launch(Request(args.config, tuple(overrides), args.dry_run, worker=worker, trains=True), os.environ)
    check_counts(world_size=args.world_size)
    config = read_config(args)
    if args.ladder:
        return _ladder(config, args)
    # torch is imported only here, so that `--help` and mistakes are answered at once.
    from triaxis.engine.config.quantities.extension_costs import with_costs
    from triaxis.launch.footprint.own_costs import OwnCostsMeter
    from triaxis.launch.footprint.run import Footprints
    from triaxis.models.gpt.chunk import build_chunks
    from triaxis.models.predict.rank_memory import resolve_recompute

    begin = time.monotonic()
    footprints = Footprints(config, build_chunks, full=args.full)
    config = with_costs(config, OwnCostsMeter()(config, footprints.sizes))
    config = resolve_recompute(config, footprints.sizes)
    console = wide_console()
    tree: dict[str, object] = {"layout": str(footprints.sizes)}
    if args.replay:
        tree["replay"] = _replay(console, footprints)
    else:
        ranks = []
        for rank in args.rank or [0]:
            print(f"one step of rank {rank} of {footprints.sizes.world_size:,} ...", file=sys.stderr)
            found = footprints.of(rank)
            between, most = in_bytes(sum(found.state.values())), in_bytes(found.peak.total)
            console.print(
                f"{args.config}: rank {rank} holds {most} at the peak of a step, {between} between steps", markup=False
            )
            show_footprint(console, config, rank, found)
            ranks.append(as_json(config, rank, found) | (_real(console, config, rank, found) if args.real else {}))
        tree["ranks"] = ranks
    print(f"{time.monotonic() - begin:.1f} seconds", file=sys.stderr)
    print_json(args, tree, args.output)
    return 0


def _problems(args: argparse.Namespace) -> Iterator[str]:
    for mode, (why, *useless) in MODES.items():
        if getattr(args, mode):
            for option in typed(args, *useless):
                yield f"--{mode} with {option}: {why}, and {option} would do nothing. Leave one out."
    if args.gpu_kind is not None and not args.ladder:
        yield "--gpu-kind without --ladder: nothing else is predicted for a kind of GPU. Leave it out, or add --ladder."
    if args.dry_run and not args.measured:
        yield "--dry-run without --measured: no ranks are started, so there is no line to print. Leave it out, or add --measured."


def _ladder(config: Config, args: argparse.Namespace) -> int:
    from triaxis.launch.footprint.ladder import ladder
    from triaxis.launch.footprint.own_costs import OwnCostsMeter

    found = ladder(config, args.gpu_kind or DEVICE, measure=OwnCostsMeter())
    sizes, cluster = parallel_sizes(config), found.cluster
    console = wide_console()
    console.print(f"{args.config}: {sizes} on {cluster.nodes} x {cluster.gpus_per_node} {cluster.device}", markup=False)
    console.print(found.table())
    for note in found.notes:
        console.print(note, markup=False)
    print_json(args, {"layout": str(sizes), **found.as_json()}, args.output)
    return 0


def read_config(args: argparse.Namespace) -> Config:
    """Read the config with `parallel.dp` filled in from the layout or the world size.

    Raises:
        ConfigError: the config has problems (all are listed), or nothing sets dp.
    """
    layout = [] if args.layout is None else layout_overrides(args.layout, dp_is_open=args.world_size is not None)
    config = load_config(args.config, (*args.overrides, *layout), os.environ, world_size=args.world_size)
    if config.parallel.dp is None and args.world_size is None:
        problem = (
            "parallel.dp is open, and no machine's size fills it. Give the ranks, --gpus N, or the size, parallel.dp=N."
        )
        refuse([problem], str(args.config))
    return with_value(config, "parallel.dp", parallel_sizes(config, args.world_size).dp)


def _real(console: Console, config: Config, rank: int, counted: "Footprint") -> dict[str, object]:
    """Run the rank's steps on a device, and compare the measurements with the counts."""
    from triaxis.engine.comm.placement import place
    from triaxis.engine.device.allocator import set_up_allocator
    from triaxis.launch.footprint.real import real_steps
    from triaxis.models.gpt.chunk import build_chunks

    device = place(config.runtime, 0, os.environ).device
    if device.type == "cuda":
        set_up_allocator(config.runtime, os.environ, device)
    print(f"{1 + REAL_STEPS} steps of rank {rank} on {device} ...", file=sys.stderr)
    real = real_steps(config, rank, build_chunks, device, num_steps=REAL_STEPS)
    table = _table(f"on {_device_name(device)}, as if the network took no time", "what", "measured", "counted above")
    table.add_row("a step, seconds", f"{min(real.seconds):.4f} to {max(real.seconds):.4f}", "")
    if real.peak_allocated_bytes is not None and real.peak_reserved_bytes is not None:
        table.add_row("most in tensors", in_bytes(real.peak_allocated_bytes), in_bytes(counted.peak.total))
        table.add_row("most held by the allocator", in_bytes(real.peak_reserved_bytes), "")
    table.add_row("calls sent", f"{len(real.events):,}", f"{len(counted.events):,}")
    console.print(table)
    return {
        "real": {
            "device": _device_name(device),
            "step_seconds": real.seconds,
            "peak_allocated_bytes": real.peak_allocated_bytes,
            "peak_reserved_bytes": real.peak_reserved_bytes,
            "calls": len(real.events),
        }
    }


def _device_name(device: "torch.device") -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def _replay(console: Console, footprints: "Footprints") -> dict[str, object]:
    """Run ranks, then replay their recorded calls together. Raises ScheduleError if a call lacks its counterpart."""
    from triaxis.launch.footprint.replay import replay

    world = footprints.sizes.world_size
    if world <= MOST_RANKS_OF_A_WHOLE_REPLAY:
        print(f"one step of each of {world} ranks ...", file=sys.stderr)
        logs = {rank: footprints.of(rank).log for rank in range(world)}
        who = f"all {world} ranks"
    else:
        print(f"one step of each stage of {footprints.sizes} ...", file=sys.stderr)
        logs = {footprints.grid.rank(pp=pp): found.log for pp, found in enumerate(footprints.of_stages())}
        who = f"a rank of each of {len(logs)} pipeline ranks, for {world:,} ranks"
    model = footprints.config.model
    met = replay(logs, footprints.grid, model.kv_heads, has_experts=model.has_experts)
    console.print(f"[bold]{who}[/], {footprints.num_microbatches} microbatches: every call met its other ends")
    table = _table("met", "axis", "collectives", "messages")
    for axis in sorted(met.collectives.keys() | met.messages.keys()):
        table.add_row(axis, f"{met.collectives.get(axis, 0):,}", f"{met.messages.get(axis, 0):,}")
    console.print(table if world > 1 else "nothing is sent: one rank")
    return {"ranks": sorted(logs), "collectives": met.collectives, "messages": met.messages}


def show_footprint(console: Console, config: Config, rank: int, found: "Footprint") -> None:
    """Print a rank's memory, saved tensors beside the formula's prediction, traffic and operators."""
    from triaxis.models.predict.traffic import measured_traffic

    stages = ", ".join(map(str, found.stages))
    run, all_ = found.run_microbatches, found.num_microbatches
    how = "all of them run" if run == all_ else f"{run} run, {all_ - run} added up from those like them"
    console.print(
        f"[bold]rank {rank}[/] ({found.coordinates}), stage{'s' if len(found.stages) > 1 else ''} {stages}, of "
        f"{parallel_sizes(config)}; {all_} microbatches of {config.train.micro_batch_size}: {how}"
    )
    memory = _table("memory", "kind", "at the peak", "most of the kind")
    for kind, most in found.most.items():
        memory.add_row(kind, in_bytes(found.peak.by_kind.get(kind, 0)), in_bytes(most))
    memory.add_row("all", in_bytes(found.peak.total), "", style="bold")
    console.print(memory)
    one = found.largest
    console.print(
        f"the largest tensor that the step makes: {_form(one.shape, one.dtype)}, {in_bytes(one.num_bytes)}, by {one.operator} "
        f"in {one.site or '(the chunk itself)'}"
    )

    saved = _table("kept by a microbatch for its backward", "by", "tensor", "bytes", "times")
    for (site, tensor, num_bytes), times in _alike(found).items():
        saved.add_row(site, tensor, in_bytes(num_bytes), str(times))
    saved.add_row("all", "", in_bytes(sum(one.num_bytes for one in found.saved)), "", style="bold")
    console.print(saved)
    _show_formula(console, config, found)

    traffic = _table("sent in a step", "axis and purpose", "operation", "calls", "wire bytes")
    for flow, volume in sorted(measured_traffic(found.events).items()):
        operation = flow.op.replace("_", "-")
        traffic.add_row(f"{flow.axis}, {flow.purpose}", operation, f"{volume.calls:,}", in_bytes(volume.wire_bytes))
    console.print(traffic if found.log else "nothing is sent: one rank")

    operators = _table("operators dispatched in a step", "by", "operators", "most often")
    for place, counts in sorted(found.ops.items(), key=lambda item: -item[1].total()):
        names = ", ".join(f"{name.removeprefix('aten::')} {count:,}" for name, count in counts.most_common(SHOWN_OPS))
        operators.add_row(place, f"{counts.total():,}", names)
    operators.add_row("all", f"{sum(counts.total() for counts in found.ops.values()):,}", "", style="bold")
    console.print(operators)


def _show_formula(console: Console, config: Config, found: "Footprint") -> None:
    """Print the formula's terms for one layer and their sum, next to the bytes that were counted."""
    from triaxis.launch.footprint.run import assumed_documents
    from triaxis.models.predict.experts.memory import worst_load
    from triaxis.models.predict.layer_terms import block_terms, paper_per_token, per_token
    from triaxis.models.predict.recompute_choice import usual_layer

    terms = block_terms(config, parallel_sizes(config), usual_layer(config))
    h = config.model.hidden_size
    again = " (recomputed here: of each group of layers only the input is kept)"
    title = f"the formula for a layer, bytes per token{again if config.recompute.granularity == 'full' else ''}"
    table = _table(title, "by", "tensor", "2205.05198", "here")
    for term in terms:
        if term.paper or term.ours:
            table.add_row(
                f"blocks.N.{term.module}", term.tensor, f"{float(term.paper):,.6g}", f"{float(term.ours):,.6g}"
            )
    in_paper, here = paper_per_token(terms), per_token(terms)
    table.add_row("all", "", f"{float(in_paper):,.6g}", f"{float(here):,.6g}", style="bold")
    table.add_row("all / h", "", f"{float(in_paper / h):.4g} h", f"{float(here / h):.4g} h", style="bold")
    console.print(table)
    expected, measured = _formula_bytes(config, found), sum(one.num_bytes for one in found.saved)
    off = f" ({100 * (measured / expected - 1):+.2f} %)" if expected else ""
    console.print(
        f"the formula for this rank's microbatch: {in_bytes(round(expected))}; kept: {in_bytes(measured)}{off}"
    )
    if config.model.has_experts:
        console.print(
            "experts: chosen in turn, so that all get equally many rows (model.moe.force_balanced); with dispatch by all_to_all "
            "another routing sends and keeps other rows, at worst "
            f"{float(worst_load(config, parallel_sizes(config))):.3g} times as many on a rank"
        )
    if (lengths := assumed_documents(config)) is not None:
        console.print(
            f"documents: each sample has {len(lengths)}, of {lengths[0]:,} tokens (data.synthetic_document_length); others keep "
            "the same bytes and take other times"
        )


def _formula_bytes(config: Config, found: "Footprint") -> float:
    """Predict how many bytes a microbatch saves in the rank's chunks, including those moved to the host."""
    from triaxis.models.predict.activation_memory import kept_bytes, moved_bytes

    sizes = parallel_sizes(config)
    stages = stages_of(config)
    mine = [stages[stage] for stage in found.stages]
    return float(sum(kept_bytes(config, sizes, stage) + moved_bytes(config, sizes, stage) for stage in mine))


def _table(title: str, *columns: str) -> Table:
    return terminal_table(*columns, names=(columns[0], "operation", "tensor", "most often"), title=title)


def _alike(found: "Footprint") -> Counter[tuple[str, str, int]]:
    """Count the tensors saved for the backward by (saving module, shape and dtype, bytes).

    Layer and chunk numbers are dropped from the module's name.
    """
    rows: Counter[tuple[str, str, int]] = Counter()
    for one in found.saved:
        site = re.sub(r"\.\d+\.", ".N.", re.sub(r"^chunk \d+: ", "", one.site)) or "(the chunk itself)"
        rows[site, _form(one.shape, one.dtype), one.num_bytes] += 1
    return rows


def _form(shape: Sequence[int], dtype: "torch.dtype") -> str:
    return f"{list(shape)} {_name(dtype)}"


def _name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


def as_json(config: Config, rank: int, found: "Footprint") -> dict[str, object]:
    """Build the JSON output. All sizes are in bytes."""
    from triaxis.models.predict.traffic import measured_traffic

    return {
        "rank": rank,
        "coordinates": asdict(found.coordinates),
        "stages": found.stages,
        "num_microbatches": found.num_microbatches,
        "run_microbatches": found.run_microbatches,
        "state_bytes": found.state,
        "peak_bytes": found.peak.by_kind,
        "most_bytes": found.most,
        "largest": asdict(found.largest) | {"dtype": _name(found.largest.dtype)},
        "formula_activation_bytes": _formula_bytes(config, found),
        "saved": [asdict(one) | {"dtype": _name(one.dtype)} for one in found.saved],
        "traffic": [asdict(flow) | asdict(volume) for flow, volume in sorted(measured_traffic(found.events).items())],
        "ops": {place: dict(counts) for place, counts in found.ops.items()},
    }
